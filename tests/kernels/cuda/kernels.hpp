// Kernels of the tests' own.
#pragma once

#include <cuda_runtime_api.h>

namespace cuflash_test {

// Keeps a stream busy for about so long.
cudaError_t spin(int milliseconds, cudaStream_t stream);

// Writes to an address that nobody owns: the context is lost.
cudaError_t fault(cudaStream_t stream);

}  // namespace cuflash_test
