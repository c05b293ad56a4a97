/*
 * The shortest call: dense tensors, plain pointers, no struct, no handle.
 *
 *     cc positional.c $(pkg-config --cflags --libs cuflash) -lm -o positional && ./positional
 */
#include <cuflash.h>

#include <math.h>
#include <stdio.h>

enum { BATCH = 1, HEADS = 2, LENGTH = 5, HEAD_DIM = 8, ROWS = BATCH * HEADS * LENGTH };

int main(void) {
  float q[ROWS * HEAD_DIM], k[ROWS * HEAD_DIM], v[ROWS * HEAD_DIM], o[ROWS * HEAD_DIM], lse[ROWS];
  for (int i = 0; i < ROWS * HEAD_DIM; i++) {
    q[i] = sinf((float)i);
    k[i] = cosf((float)i);
    v[i] = (float)(i % 7);
  }

  /* Without this line the pointers are device memory and the call is enqueued on the stream. */
  cuflash_set_default_device(CUFLASH_DEVICE_CPU);
  cuflash_status_t status =
      cuflash_attention_forward_f32(q, k, v, o, lse, BATCH, HEADS, LENGTH, HEAD_DIM,
                                    0.35f /* scale */, 1 /* causal */, NULL /* stream */);
  if (status != CUFLASH_SUCCESS) {
    fprintf(stderr, "%s: %s\n", cuflash_status_name(status), cuflash_last_error());
    return 1;
  }

  for (int i = 0; i < LENGTH; i++)
    printf("row %d: o[0] = %.4f, lse = %.4f\n", i, o[i * HEAD_DIM], lse[i]);
  return o[0] == v[0] ? 0 : 1; /* row 0 sees only key 0 */
}
