/* The calls of table.tsv in C, on the CPU device: run table.tsv. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuflash.h"

enum { B = 2, HQ = 4, HKV = 2, SQ = 5, SK = 7, D = 8, QUERIES = B * HQ * SQ, KEYS = B * HKV * SK };
enum { UNTOUCHED = -77 };

/* A small legal call of every operation, to be spoilt in one thing. */
typedef struct {
  float q[QUERIES * D], k[KEYS * D], v[KEYS * D], d_o[QUERIES * D];
  float o[QUERIES * D], lse[QUERIES], dq[QUERIES * D], dk[KEYS * D], dv[KEYS * D];
  int32_t lengths[B];
  cuflash_problem_t problem;
  cuflash_gradients_t gradients;
  cuflash_kv_cache_t cache;
  cuflash_kv_append_t append;
  cuflash_handle_t handle;
  cuflash_stream_t stream;
  int32_t device;
  int32_t option;
  int64_t value;
  unsigned char longer[sizeof(cuflash_problem_t) + 8]; /* a struct of a newer header */
} call_t;

static void fail(const char* id, const char* what) {
  fprintf(stderr, "%s: %s; the message: \"%s\"\n", id, what, cuflash_last_error());
  exit(1);
}

static void fill(float* values, int count, float first) {
  int i;
  for (i = 0; i < count; ++i) values[i] = first + (float)(i * 37 % 17) / 16;
}

static void clear(float* values, int count) {
  int i;
  for (i = 0; i < count; ++i) values[i] = UNTOUCHED;
}

static cuflash_tensor_t dense(float* data) {
  cuflash_tensor_t tensor;
  memset(&tensor, 0, sizeof tensor);
  tensor.data = data;
  tensor.flags = CUFLASH_TENSOR_DENSE;
  tensor.dtype = CUFLASH_F32;
  return tensor;
}

static void prepare(call_t* c, cuflash_handle_t handle) {
  memset(c, 0, sizeof *c);
  fill(c->q, QUERIES * D, -0.5f);
  fill(c->k, KEYS * D, -0.25f);
  fill(c->v, KEYS * D, -1);
  fill(c->d_o, QUERIES * D, 0);
  clear(c->o, QUERIES * D);
  clear(c->lse, QUERIES);
  clear(c->dq, QUERIES * D);
  clear(c->dk, KEYS * D);
  clear(c->dv, KEYS * D);
  c->lengths[0] = SK;
  c->lengths[1] = SK - 2;
  cuflash_problem_init(&c->problem, sizeof c->problem);
  c->problem.batch = B;
  c->problem.heads_q = HQ;
  c->problem.heads_kv = HKV;
  c->problem.len_q = SQ;
  c->problem.len_k = SK;
  c->problem.head_dim = D;
  c->problem.q = dense(c->q);
  c->problem.k = dense(c->k);
  c->problem.v = dense(c->v);
  c->problem.o = dense(c->o);
  c->problem.lse = c->lse;
  cuflash_gradients_init(&c->gradients, sizeof c->gradients);
  c->gradients.d_o = dense(c->d_o);
  c->gradients.dq = dense(c->dq);
  c->gradients.dk = dense(c->dk);
  c->gradients.dv = dense(c->dv);
  cuflash_kv_cache_init(&c->cache, sizeof c->cache);
  c->cache.k = c->problem.k;
  c->cache.v = c->problem.v;
  c->cache.max_len = SK;
  c->cache.lengths = c->lengths;
  cuflash_kv_append_init(&c->append, sizeof c->append);
  c->append.batch = B;
  c->append.heads_kv = HKV;
  c->append.len = 1;
  c->append.head_dim = D;
  c->append.k = c->append.v = c->problem.q;
  c->handle = handle;
  c->device = CUFLASH_DEVICE_CPU;
  c->option = CUFLASH_OPTION_CPU_THREADS;
}

static cuflash_status_t make(call_t* c, const char* operation) {
  if (strcmp(operation, "forward") == 0)
    return cuflash_attention_forward(c->handle, &c->problem, c->stream);
  if (strcmp(operation, "backward") == 0)
    return cuflash_attention_backward(c->handle, &c->problem, &c->gradients, c->stream);
  if (strcmp(operation, "decode") == 0) {
    memset(&c->problem.k, 0, sizeof c->problem.k);
    memset(&c->problem.v, 0, sizeof c->problem.v);
    c->problem.len_k = 0;
    return cuflash_attention_decode(c->handle, &c->problem, &c->cache, c->stream);
  }
  if (strcmp(operation, "append") == 0) {
    c->cache.k = c->gradients.dk;
    c->cache.v = c->gradients.dv;
    return cuflash_kv_cache_append(c->handle, &c->cache, &c->append, c->stream);
  }
  if (strcmp(operation, "create") == 0) return cuflash_create(&c->handle, c->device);
  if (strcmp(operation, "option") == 0) return cuflash_set_option(c->handle, c->option, c->value);
  if (strcmp(operation, "explain") == 0)
    return cuflash_forward_explain(c->handle, &c->problem, NULL, 0, NULL);
  fail(operation, "an operation without code");
  return -1;
}

static cuflash_tensor_t strided(cuflash_tensor_t tensor, int rows, int64_t row_stride) {
  tensor.flags = 0;
  tensor.row_stride = row_stride;
  tensor.head_stride = (int64_t)rows * D;
  tensor.batch_stride = 2 * tensor.head_stride;
  return tensor;
}

static void dtype(call_t* c) { c->problem.q.dtype = 99; }
static void dtype_of_k(call_t* c) { c->problem.k.dtype = CUFLASH_F16; }
static void dtype_of_o(call_t* c) { c->problem.o.dtype = CUFLASH_F16; }
static void device_unknown(call_t* c) { c->device = 999; }
static void device_negative(call_t* c) { c->device = -99; }
static void stream_on_cpu(call_t* c) { c->stream = (cuflash_stream_t)c; }
static void stride_negative(call_t* c) { c->problem.k = strided(c->problem.k, SK, -D); }
static void heads(call_t* c) { c->problem.heads_q = 3; }
static void head_dim(call_t* c) { c->problem.head_dim = 577; }
static void extent_negative(call_t* c) { c->problem.batch = -1; }
static void null(call_t* c) { c->problem.q.data = NULL; }
static void misaligned(call_t* c) { c->problem.q.data = (char*)c->q + 1; }
static void struct_size(call_t* c) { c->problem.struct_size = 8; }
static void flag_unknown(call_t* c) { c->problem.flags = 0x80000000u; }
static void scale(call_t* c, float value) {
  c->problem.flags = CUFLASH_PROBLEM_SCALE_SET;
  c->problem.scale = value;
}
static void scale_negative(call_t* c) { scale(c, -1); }
static void scale_nan(call_t* c) { scale(c, NAN); }
static void window(call_t* c) {
  c->problem.flags = CUFLASH_PROBLEM_WINDOW;
  c->problem.window_left = -5;
}
static void splits(call_t* c) { c->problem.num_splits = 2000; }
static void tree_mask(call_t* c) {
  static const uint32_t words[1] = {~0u};
  c->problem.tree_mask = words;
}
static void zero_of_floats(call_t* c) { c->cache.k_zero = c->d_o; }
static void append_nowhere(call_t* c) { c->cache.lengths = NULL; }
static void rotary_dim(call_t* c) {
  c->append.cos = c->append.sin = c->d_o;
  c->append.max_position = 1;
  c->append.rotary_dim = D + 2;
}
static void kernel_unknown(call_t* c) { c->problem.kernel = "nonsense"; }
static void kernel_refuses(call_t* c) { c->problem.kernel = "fwd_reference"; }
static void option(call_t* c) { c->value = -1; }
static void option_unknown(call_t* c) { c->option = 99; }
static void arch_unknown(call_t* c) { c->problem.target_arch = 12; }
static void arch_of_a_call(call_t* c) { c->problem.target_arch = 90; }
static void o_is_q(call_t* c) { c->problem.o = c->problem.q; }
static void dk_is_dv(call_t* c) { c->gradients.dk = c->gradients.dv; }
static void o_repeats(call_t* c) { c->problem.o = strided(c->problem.o, SQ, 0); }
static void workspace_too_small(call_t* c) {
  static unsigned char memory[1 << 20];
  size_t bytes = 0;
  if (cuflash_forward_workspace_size(c->handle, &c->problem, &bytes) || bytes == 0)
    fail("workspace-too-small", "the call needs no workspace");
  c->problem.workspace = memory + (256 - (uintptr_t)memory % 256) % 256;
  c->problem.workspace_size = bytes - 1;
}

/* That of the problem grows by 8 bytes, and the last of them is set. */
static void struct_newer(call_t* c) {
  c->problem.struct_size = sizeof c->longer;
  memcpy(c->longer, &c->problem, sizeof c->problem);
  c->longer[sizeof c->longer - 1] = 1;
}

static const struct {
  const char* id;
  void (*spoil)(call_t*);
} kSpoilers[] = {
    {"dtype", dtype},
    {"dtype-of-k", dtype_of_k},
    {"dtype-of-o", dtype_of_o},
    {"device-unknown", device_unknown},
    {"device-negative", device_negative},
    {"stream-on-cpu", stream_on_cpu},
    {"stride-negative", stride_negative},
    {"heads", heads},
    {"head-dim", head_dim},
    {"extent-negative", extent_negative},
    {"null", null},
    {"misaligned", misaligned},
    {"struct-size", struct_size},
    {"struct-newer", struct_newer},
    {"flag-unknown", flag_unknown},
    {"scale-negative", scale_negative},
    {"scale-nan", scale_nan},
    {"window", window},
    {"splits", splits},
    {"tree-mask", tree_mask},
    {"zero-of-floats", zero_of_floats},
    {"append-nowhere", append_nowhere},
    {"rotary-dim", rotary_dim},
    {"kernel-unknown", kernel_unknown},
    {"kernel-refuses", kernel_refuses},
    {"option", option},
    {"option-unknown", option_unknown},
    {"arch-unknown", arch_unknown},
    {"arch-of-a-call", arch_of_a_call},
    {"o-is-q", o_is_q},
    {"dk-is-dv", dk_is_dv},
    {"o-repeats", o_repeats},
    {"workspace-too-small", workspace_too_small},
};
enum { SPOILERS = sizeof kSpoilers / sizeof kSpoilers[0] };

/* Whether one of the items, separated by `separator`, is in the text, or is the whole of it. */
static int any_of(const char* items, char separator, const char* text, int whole) {
  while (*items != '\0') {
    char item[64];
    size_t length = strcspn(items, (char[]){separator, '\0'});
    if (length >= sizeof item) fail(items, "too long a word");
    memcpy(item, items, length);
    item[length] = '\0';
    if (whole ? strcmp(item, text) == 0 : strstr(text, item) != NULL) return 1;
    items += length + (items[length] != '\0');
  }
  return 0;
}

static int is_untouched(const float* values, int count) {
  int i;
  for (i = 0; i < count; ++i)
    if (values[i] != UNTOUCHED) return 0;
  return 1;
}

static void check_good_call(const char* id, cuflash_handle_t handle, const float* wanted) {
  static call_t good;
  prepare(&good, handle);
  if (make(&good, "forward") != 0 || memcmp(good.o, wanted, sizeof good.o) != 0)
    fail(id, "the next good call does not work");
}

static void check(const char* id, const char* operation, const char* statuses, char* words,
                  cuflash_handle_t handle) {
  static call_t call;
  const char* prefix = "CUFLASH_ERROR_";
  cuflash_status_t status;
  const char* name;
  char* word;
  int i = 0;
  while (i < SPOILERS && strcmp(kSpoilers[i].id, id) != 0) ++i;
  if (i == SPOILERS) fail(id, "a call of the table without code");
  prepare(&call, handle);
  kSpoilers[i].spoil(&call);
  if (call.problem.struct_size == sizeof call.longer)
    status = cuflash_attention_forward(handle, (const cuflash_problem_t*)call.longer, NULL);
  else
    status = make(&call, operation);
  name = cuflash_status_name(status);
  if (strncmp(name, prefix, strlen(prefix)) != 0 ||
      !any_of(statuses, '|', name + strlen(prefix), 1))
    fail(id, name);
  for (word = strtok(words, ","); word != NULL; word = strtok(NULL, ","))
    if (strcmp(word, "-") != 0 && !any_of(word, '|', cuflash_last_error(), 0)) fail(id, word);
  if (!is_untouched(call.o, QUERIES * D) || !is_untouched(call.lse, QUERIES) ||
      !is_untouched(call.dq, QUERIES * D) || !is_untouched(call.dk, KEYS * D) ||
      !is_untouched(call.dv, KEYS * D))
    fail(id, "the call has written");
}

int main(int argc, char** argv) {
  static call_t first;
  cuflash_handle_t handle = NULL;
  char line[1024];
  int made = 0, impossible = 0;
  FILE* table = argc == 2 ? fopen(argv[1], "r") : NULL;
  if (table == NULL) fail("run", "which table?");
  if (cuflash_create(&handle, CUFLASH_DEVICE_CPU) != 0) fail("run", "no CPU device");
  prepare(&first, handle);
  if (make(&first, "forward") != 0) fail("run", "the unspoilt call fails");
  while (fgets(line, sizeof line, table) != NULL) {
    char* column[6];
    int i;
    if (line[0] == '#') continue;
    for (i = 0; i < 6; ++i) {
      column[i] = strtok(i == 0 ? line : NULL, "\t\n");
      if (column[i] == NULL) fail(line, "a column is missing");
    }
    if (strncmp(column[5], "c: ", 3) == 0) {
      ++impossible;
      continue;
    }
    check(column[0], column[1], column[3], column[4], handle);
    check_good_call(column[0], handle, first.o);
    ++made;
  }
  fclose(table);
  cuflash_destroy(handle);
  if (made != SPOILERS) fail("run", "code for a call that is not in the table");
  printf("%d calls refused, %d cannot be written in C\n", made, impossible);
  return 0;
}
