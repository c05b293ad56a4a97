/*
 * Causal attention of a small problem from C, checked against a loop.
 *
 *     cc forward.c $(pkg-config --cflags --libs cuflash) -lm -o forward && ./forward
 *
 * It runs on the CPU device. Compiled with -DWITH_CUDA and linked with the CUDA runtime it also runs
 * on the GPU: the call is the same, the pointers are device memory.
 */
#include <cuflash.h>

#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#endif

enum { BATCH = 2, HEADS = 4, HEADS_KV = 2, LENGTH = 100, HEAD_DIM = 64 };
enum { Q_SIZE = BATCH * HEADS * LENGTH * HEAD_DIM, KV_SIZE = BATCH * HEADS_KV * LENGTH * HEAD_DIM };

static void require(cuflash_status_t status) {
  if (status != CUFLASH_SUCCESS) {
    fprintf(stderr, "%s: %s\n", cuflash_status_name(status), cuflash_last_error());
    exit(1);
  }
}

/* Query heads share key and value heads: 4 read 2. */
static cuflash_problem_t causal_problem(const float* q, const float* k, const float* v, float* o) {
  cuflash_problem_t p;
  require(cuflash_problem_init(&p, sizeof p));
  p.batch = BATCH;
  p.heads_q = HEADS;
  p.heads_kv = HEADS_KV;
  p.len_q = p.len_k = LENGTH;
  p.head_dim = HEAD_DIM;
  p.q.data = (void*)q;
  p.k.data = (void*)k;
  p.v.data = (void*)v;
  p.o.data = o;
  p.q.dtype = CUFLASH_F32; /* the others follow q */
  p.q.flags = p.k.flags = p.v.flags = p.o.flags = CUFLASH_TENSOR_DENSE;
  p.mask = CUFLASH_MASK_CAUSAL;
  return p; /* the scale is 1/sqrt(head_dim) unless set */
}

static float largest_error(const float* q, const float* k, const float* v, const float* o) {
  float worst = 0;
  for (int bh = 0; bh < BATCH * HEADS; bh++) {
    int bh_kv = bh / (HEADS / HEADS_KV);
    for (int i = 0; i < LENGTH; i++) {
      const float* q_row = q + (bh * LENGTH + i) * HEAD_DIM;
      double sum = 0, expected[HEAD_DIM] = {0};
      for (int j = 0; j <= i; j++) {
        const float* k_row = k + (bh_kv * LENGTH + j) * HEAD_DIM;
        const float* v_row = v + (bh_kv * LENGTH + j) * HEAD_DIM;
        double score = 0;
        for (int d = 0; d < HEAD_DIM; d++) score += (double)q_row[d] * k_row[d];
        double weight = exp(score / sqrt(HEAD_DIM));
        sum += weight;
        for (int d = 0; d < HEAD_DIM; d++) expected[d] += weight * v_row[d];
      }
      for (int d = 0; d < HEAD_DIM; d++) {
        float error = (float)fabs(expected[d] / sum - o[(bh * LENGTH + i) * HEAD_DIM + d]);
        if (!(error <= worst)) worst = error; /* true for NaN too */
      }
    }
  }
  return worst;
}

static int report(const char* device, float error) {
  int ok = error < 1e-5f;
  printf("%-4s largest error %.1e: %s\n", device, error, ok ? "ok" : "WRONG");
  return ok ? 0 : 1;
}

#ifdef WITH_CUDA
static void require_cuda(cudaError_t error) {
  if (error != cudaSuccess) {
    fprintf(stderr, "%s\n", cudaGetErrorString(error));
    exit(1);
  }
}

static float* to_device(const float* host, size_t count) {
  void* device;
  require_cuda(cudaMalloc(&device, count * sizeof(float)));
  require_cuda(cudaMemcpy(device, host, count * sizeof(float), cudaMemcpyHostToDevice));
  return device;
}

static void forward_cuda(const float* q, const float* k, const float* v, float* o) {
  float *d_q = to_device(q, Q_SIZE), *d_k = to_device(k, KV_SIZE), *d_v = to_device(v, KV_SIZE);
  float* d_o = to_device(o, Q_SIZE);
  cuflash_problem_t problem = causal_problem(d_q, d_k, d_v, d_o);
  cudaStream_t stream;
  require_cuda(cudaStreamCreate(&stream));
  require(cuflash_attention_forward(NULL, &problem, stream)); /* only enqueues */
  require_cuda(cudaStreamSynchronize(stream));
  require_cuda(cudaMemcpy(o, d_o, Q_SIZE * sizeof(float), cudaMemcpyDeviceToHost));
  require_cuda(cudaStreamDestroy(stream));
  require_cuda(cudaFree(d_q));
  require_cuda(cudaFree(d_k));
  require_cuda(cudaFree(d_v));
  require_cuda(cudaFree(d_o));
}
#endif

static void forward_cpu(const float* q, const float* k, const float* v, float* o) {
  cuflash_handle_t cpu;
  require(cuflash_create(&cpu, CUFLASH_DEVICE_CPU));
  cuflash_problem_t problem = causal_problem(q, k, v, o);
  require(cuflash_attention_forward(cpu, &problem, NULL));
  require(cuflash_destroy(cpu));
}

static float* random_floats(size_t count) {
  float* values = malloc(count * sizeof(float));
  if (values == NULL) exit(1);
  for (size_t i = 0; i < count; i++) values[i] = 2.0f * rand() / RAND_MAX - 1.0f;
  return values;
}

int main(void) {
  int32_t major, minor, patch;
  cuflash_version(&major, &minor, &patch);
  printf("cuflash %d.%d.%d, compiled with the header of %d.%d.%d\n", major, minor, patch,
         CUFLASH_VERSION_MAJOR, CUFLASH_VERSION_MINOR, CUFLASH_VERSION_PATCH);

  float *q = random_floats(Q_SIZE), *k = random_floats(KV_SIZE), *v = random_floats(KV_SIZE);
  float* o = random_floats(Q_SIZE);
  forward_cpu(q, k, v, o);
  int failed = report("CPU", largest_error(q, k, v, o));
#ifdef WITH_CUDA
  int devices = 0;
  if (cudaGetDeviceCount(&devices) != cudaSuccess || devices == 0) {
    printf("no CUDA device here\n");
    return failed ? failed : 77; /* what test runners take as skipped */
  }
  forward_cuda(q, k, v, o);
  failed |= report("CUDA", largest_error(q, k, v, o));
#endif
  free(q);
  free(k);
  free(v);
  free(o);
  return failed;
}
