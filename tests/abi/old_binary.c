/* A program of some release: compiled against that release's cuflash.h and run on today's library, by
 * old_binary.py. It knows no name that came after the first release, and checks what each struct and
 * group of constants means by results that are known: queries and keys are zero, so that a row's result
 * is the mean of the values that it sees, and its LSE the logarithm of their number.
 *
 * FROM_THE_FUTURE: the header is newer than the library, each of its structs has one more field. */
#include <cuflash.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

enum { HEADS = 2, LEN = 3, DIM = 4 };

static int failures;

static void check(int condition, const char* text, int line) {
  if (condition) return;
  ++failures;
  printf("old_binary.c:%d: %s; last error: %s\n", line, text, cuflash_last_error());
}
#define CHECK(condition) check(condition, #condition, __LINE__)
#define NEAR(value, expected) CHECK(fabs((value) - (expected)) < 1e-5)

/* A call with a struct: it succeeds, and with a field set that the library cannot know it is refused. */
#ifdef FROM_THE_FUTURE
#define CALL(object, call)                                          \
  do {                                                              \
    CHECK((call) == CUFLASH_SUCCESS);                               \
    (object).from_the_future = 1;                                   \
    CHECK((call) == CUFLASH_ERROR_STRUCT_SIZE);                     \
    CHECK(strstr(cuflash_last_error(), #object ": byte ") != NULL); \
    (object).from_the_future = 0;                                   \
  } while (0)
#else
#define CALL(object, call) CHECK((call) == CUFLASH_SUCCESS)
#endif

static const float zero[HEADS * LEN * DIM];
static float values[LEN * DIM], o[HEADS * LEN * DIM], lse[HEADS * LEN];

static cuflash_tensor_t dense(const void* data) {
  cuflash_tensor_t tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = (void*)data;
  tensor.flags = CUFLASH_TENSOR_DENSE;
  tensor.dtype = CUFLASH_F32;
  return tensor;
}

static cuflash_problem_t causal(void) {
  cuflash_problem_t problem;
  CHECK(cuflash_problem_init(&problem, sizeof problem) == CUFLASH_SUCCESS);
  problem.batch = 1;
  problem.heads_q = HEADS;
  problem.heads_kv = 1;
  problem.len_q = problem.len_k = LEN;
  problem.head_dim = DIM;
  problem.q = problem.k = dense(zero);
  problem.v = dense(values);
  problem.o = dense(o);
  problem.lse = lse;
  problem.mask = CUFLASH_MASK_CAUSAL;
  return problem;
}

static void forward(cuflash_handle_t handle) {
  cuflash_problem_t problem = causal();
  size_t bytes = 0;
  char json[64];
  int i;
  CALL(problem, cuflash_attention_forward(handle, &problem, NULL));
  for (i = 0; i < HEADS * LEN; ++i) {
    NEAR(o[i * DIM], (i % LEN) / 2.0);
    NEAR(o[i * DIM + 3], (i % LEN) / 2.0 + 30);
    NEAR(lse[i], log(1.0 + i % LEN));
  }
  problem.flags = CUFLASH_PROBLEM_WINDOW | CUFLASH_PROBLEM_SCALE_SET;
  problem.mask_align = CUFLASH_ALIGN_OFFSET;
  problem.mask_offset = 1; /* row i sees key i + 1 alone, the last row none */
  problem.scale = 2;
  CALL(problem, cuflash_attention_forward(handle, &problem, NULL));
  NEAR(o[0], 1);
  NEAR(lse[0], 0);
  CHECK(o[2 * DIM] == 0 && lse[2] == -INFINITY);
  CALL(problem, cuflash_forward_workspace_size(handle, &problem, &bytes));
  CALL(problem, cuflash_forward_explain(handle, &problem, json, sizeof json, &bytes));
  CHECK(strstr(json, "\"operation\"") != NULL && bytes > sizeof json);
  problem.kernel = "no such kernel";
  CHECK(cuflash_attention_forward(handle, &problem, NULL) == CUFLASH_ERROR_INVALID_VALUE);
}

static void backward(cuflash_handle_t handle) {
  static float ones[HEADS * LEN * DIM], dq[HEADS * LEN * DIM], dk[LEN * DIM], dv[LEN * DIM];
  cuflash_problem_t problem = causal();
  cuflash_gradients_t gradients;
  int i;
  for (i = 0; i < HEADS * LEN * DIM; ++i) ones[i] = 1;
  CHECK(cuflash_gradients_init(&gradients, sizeof gradients) == CUFLASH_SUCCESS);
  gradients.d_o = dense(ones);
  gradients.dq = dense(dq);
  gradients.dk = dense(dk);
  gradients.dv = dense(dv);
  CHECK(cuflash_attention_forward(handle, &problem, NULL) == CUFLASH_SUCCESS);
  CALL(problem, cuflash_attention_backward(handle, &problem, &gradients, NULL));
  CALL(gradients, cuflash_attention_backward(handle, &problem, &gradients, NULL));
  NEAR(dv[0], HEADS * (1 + 1 / 2.0 + 1 / 3.0));
  NEAR(dv[LEN * DIM - 1], HEADS / 3.0);
  NEAR(dq[1], 0);
}

static void decode(cuflash_handle_t handle) {
  static const int32_t two = 2;
  cuflash_problem_t problem = causal();
  cuflash_kv_cache_t cache;
  CHECK(cuflash_kv_cache_init(&cache, sizeof cache) == CUFLASH_SUCCESS);
  cache.k = problem.k;
  cache.v = problem.v;
  cache.layout = CUFLASH_CACHE_CONTIGUOUS;
  cache.max_len = LEN;
  cache.lengths = &two;
  memset(&problem.k, 0, sizeof problem.k);
  memset(&problem.v, 0, sizeof problem.v);
  problem.len_q = 1;
  problem.len_k = 0;
  CALL(problem, cuflash_attention_decode(handle, &problem, &cache, NULL));
  CALL(cache, cuflash_attention_decode(handle, &problem, &cache, NULL));
  NEAR(o[0], 0.5);
  NEAR(lse[1], log(2.0));
}

static void merge_states(cuflash_handle_t handle) {
  static const float parts[2 * DIM] = {1, 1, 1, 1, 4, 4, 4, 4},
                               lse_parts[2] = {0, 1}; /* base 2: 1 and 2 */
  cuflash_merge_t merge;
  CHECK(cuflash_merge_init(&merge, sizeof merge) == CUFLASH_SUCCESS);
  merge.flags = CUFLASH_MERGE_LSE_BASE2;
  merge.num_parts = 2;
  merge.batch = merge.heads = merge.len = 1;
  merge.head_dim = DIM;
  merge.parts = dense(parts);
  merge.part_stride = DIM;
  merge.lse_parts = lse_parts;
  merge.lse_part_stride = 1;
  merge.o = dense(o);
  CALL(merge, cuflash_merge_states(handle, &merge, NULL));
  NEAR(o[0], (1 * 1 + 2 * 4) / 3.0);
}

static void kernels(void) {
  struct {
    cuflash_kernel_info_t info;
    unsigned char beyond[64];
  } kernel;
  size_t i;
  memset(&kernel, 0xa5, sizeof kernel);
  kernel.info.struct_size = sizeof kernel.info;
  CHECK(cuflash_kernel_count() > 0);
  CHECK(cuflash_kernel_info(0, &kernel.info) == CUFLASH_SUCCESS);
  CHECK(strlen(kernel.info.name) > 0 && strlen(kernel.info.family) > 0);
  CHECK(kernel.info.operation >= CUFLASH_OPERATION_FORWARD);
  for (i = 0; i < sizeof kernel.beyond; ++i) CHECK(kernel.beyond[i] == 0xa5);
}

static void count_line(void* user, int32_t level, const char* text) {
  if (level <= CUFLASH_LOG_CALLS && strlen(text) > 0) ++*(int*)user;
}

static void the_rest(cuflash_handle_t handle) {
  int64_t threads = 0;
  int lines = 0;
  CHECK(cuflash_set_option(handle, CUFLASH_OPTION_CPU_THREADS, 1) == CUFLASH_SUCCESS);
  CHECK(cuflash_get_option(handle, CUFLASH_OPTION_CPU_THREADS, &threads) == CUFLASH_SUCCESS &&
        threads == 1);
  CHECK(strcmp(cuflash_status_name(CUFLASH_ERROR_STRUCT_SIZE), "CUFLASH_ERROR_STRUCT_SIZE") == 0);
  CHECK(cuflash_set_default_device(CUFLASH_DEVICE_CPU) == CUFLASH_SUCCESS);
  cuflash_set_log_callback(count_line, &lines, CUFLASH_LOG_CALLS);
  CHECK(cuflash_attention_forward_f32(zero, zero, zero, o, lse, 1, 1, LEN, DIM, 1, 0, NULL) ==
        CUFLASH_SUCCESS);
  cuflash_set_log_callback(NULL, NULL, CUFLASH_LOG_OFF);
  CHECK(lines > 0);
  NEAR(lse[0], log(3.0));
  CHECK(cuflash_attention_forward_f32(NULL, zero, zero, o, lse, 1, 1, LEN, DIM, 1, 0, NULL) ==
        CUFLASH_ERROR_NULL_POINTER);
}

int main(void) {
  cuflash_handle_t cpu = NULL;
  int i;
  for (i = 0; i < LEN * DIM; ++i) values[i] = (float)(i / DIM + 10 * (i % DIM));
  CHECK(cuflash_create(&cpu, CUFLASH_DEVICE_CPU) == CUFLASH_SUCCESS);
  forward(cpu);
  backward(cpu);
  decode(cpu);
  merge_states(cpu);
  kernels();
  the_rest(cpu);
  CHECK(cuflash_destroy(cpu) == CUFLASH_SUCCESS);
  return failures != 0;
}
