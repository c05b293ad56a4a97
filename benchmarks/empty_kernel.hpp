// The least that a launch costs.
#pragma once

#include <cuda_runtime_api.h>

cudaError_t launch_empty_kernel(cudaStream_t stream);
