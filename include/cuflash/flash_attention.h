/*
 * The include path of releases up to 0.6, so that their C++ programs compile as they are; new ones
 * include cuflash.hpp. As it did, it brings in CUDA's headers, but only where there are any.
 *
 * SPDX-License-Identifier: MIT
 */
#ifndef CUFLASH_FLASH_ATTENTION_H
#define CUFLASH_FLASH_ATTENTION_H

#if defined(__has_include)
#if __has_include(<cuda_runtime.h>)
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>
#endif
#endif

#include "../cuflash.hpp"

#endif  // CUFLASH_FLASH_ATTENTION_H
