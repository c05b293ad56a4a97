#include "api/checks.hpp"

#include <gtest/gtest.h>

namespace cuflash {
namespace {

TEST(Checks, StridesOfExtentsOfOneReachNoKernel) {
  alignas(16) static uint16_t memory[4][64 * 33];
  cuflash_problem_t problem = {};
  problem.struct_size = sizeof problem;
  problem.batch = problem.heads_q = problem.len_q = 1;
  problem.len_k = 33;
  problem.head_dim = 64;
  cuflash_tensor_t* const tensors[] = {&problem.q, &problem.k, &problem.v, &problem.o};
  for (int i = 0; i < 4; ++i) {
    *tensors[i] = {};
    tensors[i]->data = memory[i];
    tensors[i]->dtype = CUFLASH_F16;
    tensors[i]->batch_stride = 7;
    tensors[i]->head_stride = (int64_t{1} << 60) + 1;
    tensors[i]->row_stride = 64;
  }
  problem.q.row_stride = problem.o.row_stride = 5;
  CheckedProblem checked;
  ASSERT_EQ(check_forward(&problem, Purpose::kCall, &checked), CUFLASH_SUCCESS) << last_error();
  EXPECT_TRUE(checked.problem.aligned16);
  for (const TensorView* view :
       {&checked.problem.q, &checked.problem.k, &checked.problem.v, &checked.problem.o}) {
    EXPECT_EQ(view->batch_stride, 0);
    EXPECT_EQ(view->head_stride, 0);
  }
  EXPECT_EQ(checked.problem.q.row_stride, 0);
  EXPECT_EQ(checked.problem.k.row_stride, 64);
}

}  // namespace
}  // namespace cuflash
