// Markers for functions that the host compiler and nvcc both compile.
#pragma once

#if defined(__CUDACC__)
#define CUFLASH_HOST_DEVICE __host__ __device__ __forceinline__
#define CUFLASH_HOST_DEVICE_CALL __host__ __device__ __noinline__ inline  // one copy, called
#define CUFLASH_UNROLL _Pragma("unroll")
#else
#define CUFLASH_HOST_DEVICE inline
#define CUFLASH_HOST_DEVICE_CALL inline
#define CUFLASH_UNROLL
#endif
