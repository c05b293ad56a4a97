#include "device/tensor_map.hpp"

#include <cuda_runtime_api.h>

#include "device/runtime.hpp"
#include "device/wgmma_tile.hpp"

namespace cuflash::device {
namespace {

using Encode = decltype(&cuTensorMapEncodeTiled);

// The driver's function: the library links no driver, so that it loads where there is none.
Status find_encode(Encode* encode) {
  static const struct Found {
    void* function = nullptr;
    cudaError_t error;
    Found() {
      cudaDriverEntryPointQueryResult result;
#if CUDART_VERSION >= 12050
      error = cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000,
                                               cudaEnableDefault, &result);
#else
      error =
          cudaGetDriverEntryPoint("cuTensorMapEncodeTiled", &function, cudaEnableDefault, &result);
#endif
    }
  } found;
  if (found.error != cudaSuccess) return status_of(found.error, "cuTensorMapEncodeTiled");
  CUFLASH_CHECK(found.function != nullptr, CUFLASH_ERROR_DRIVER_TOO_OLD,
                "the CUDA driver has no cuTensorMapEncodeTiled (it came with CUDA 12.0)");
  *encode = reinterpret_cast<Encode>(found.function);
  return CUFLASH_SUCCESS;
}

}  // namespace

Status encode_tensor_map(const TensorView& tensor, int64_t batch, int64_t heads, int64_t rows,
                         int64_t channels, int box_rows, CUtensorMap* map) {
  Encode encode = nullptr;
  CUFLASH_TRY(find_encode(&encode));
  const auto size = [](int64_t n) { return static_cast<cuuint64_t>(n); };
  const cuuint64_t extents[] = {size(channels), size(rows), size(heads), size(batch)};
  const cuuint64_t strides[] = {size(2 * tensor.row_stride), size(2 * tensor.head_stride),
                                size(2 * tensor.batch_stride)};
  const cuuint32_t box[] = {kPanelColumns, static_cast<cuuint32_t>(box_rows), 1, 1};
  const cuuint32_t steps[] = {1, 1, 1, 1};
  const CUresult result =
      encode(map,
             tensor.dtype == Dtype::kF16 ? CU_TENSOR_MAP_DATA_TYPE_FLOAT16
                                         : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
             4, tensor.data, extents, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
             CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
             CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
  // The driver's numbers are the runtime's: an earlier fault comes back here as at a launch.
  return result == CUDA_SUCCESS ? CUFLASH_SUCCESS : status_of(result, "cuTensorMapEncodeTiled");
}

}  // namespace cuflash::device
