// Workspace sizes, explain, the kernel table, preload and trim.
#include <set>

#include "api/problem.hpp"

namespace cuflash_test {
namespace {

const cuflash_handle_t kCpu = handle_of(Device::kCpu);

TEST(Queries, WorkspaceSizesAreExact) {
  SmallProblem s;
  size_t bytes = 1;
  ASSERT_EQ(cuflash_backward_workspace_size(kCpu, &s.problem, &s.gradients, &bytes),
            CUFLASH_SUCCESS);
  ASSERT_GT(bytes, 0u);
  const Buffer workspace(Device::kCpu, bytes);
  s.problem.workspace = workspace.data();
  s.problem.workspace_size = bytes - 1;
  EXPECT_EQ(s.backward(), CUFLASH_ERROR_WORKSPACE_TOO_SMALL);
  EXPECT_TRUE(message_names(std::to_string(bytes)));
  EXPECT_TRUE(s.nothing_written());
  s.problem.workspace_size = bytes;
  EXPECT_EQ(s.backward(), CUFLASH_SUCCESS) << cuflash_last_error();
  EXPECT_TRUE(workspace.guards_intact());
  s.problem.flags = CUFLASH_PROBLEM_WORKSPACE_PREPARED;
  EXPECT_EQ(cuflash_workspace_prepare(kCpu, workspace.data(), bytes, nullptr), CUFLASH_SUCCESS);
  EXPECT_EQ(s.backward(), CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_workspace_prepare(kCpu, nullptr, 8, nullptr), CUFLASH_ERROR_NULL_POINTER);
  EXPECT_EQ(cuflash_workspace_prepare(kCpu, nullptr, 0, nullptr), CUFLASH_SUCCESS);
}

TEST(Queries, NeedNoPointers) {
  SmallProblem s;
  s.problem.q.data = s.problem.k.data = s.problem.v.data = s.problem.o.data = nullptr;
  s.problem.lse = nullptr;
  s.decode_problem.q.data = s.decode_problem.o.data = nullptr;
  s.cache.k.data = s.cache.v.data = nullptr;
  s.cache.lengths = nullptr;
  s.gradients.d_o.data = s.gradients.dq.data = s.gradients.dk.data = s.gradients.dv.data = nullptr;
  size_t bytes;
  EXPECT_EQ(cuflash_forward_workspace_size(kCpu, &s.problem, &bytes), CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_backward_workspace_size(kCpu, &s.problem, &s.gradients, &bytes),
            CUFLASH_SUCCESS)
      << cuflash_last_error();
  EXPECT_EQ(cuflash_decode_workspace_size(kCpu, &s.decode_problem, &s.cache, &bytes),
            CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_forward_workspace_size(kCpu, &s.problem, nullptr), CUFLASH_ERROR_NULL_POINTER);
  EXPECT_EQ(cuflash_forward_workspace_size(kCpu, nullptr, &bytes), CUFLASH_ERROR_NULL_POINTER);
  s.problem.batch = -1;
  EXPECT_EQ(cuflash_forward_workspace_size(kCpu, &s.problem, &bytes),
            CUFLASH_ERROR_INVALID_DIMENSION);
}

TEST(Queries, SplitsNeedWorkspaceForTheirParts) {
  SmallProblem s;
  size_t one = 1, four = 1, eight = 1;
  s.decode_problem.num_splits = 1;
  EXPECT_EQ(cuflash_decode_workspace_size(kCpu, &s.decode_problem, &s.cache, &one),
            CUFLASH_SUCCESS);
  s.decode_problem.num_splits = 4;
  EXPECT_EQ(cuflash_decode_workspace_size(kCpu, &s.decode_problem, &s.cache, &four),
            CUFLASH_SUCCESS);
  s.decode_problem.num_splits = 8;
  EXPECT_EQ(cuflash_decode_workspace_size(kCpu, &s.decode_problem, &s.cache, &eight),
            CUFLASH_SUCCESS);
  EXPECT_GE(four, one + 4 * 24 * 9 * sizeof(float));  // O and LSE of 24 rows of 8 channels
  EXPECT_GT(eight, four);
}

// Rows of packed tensors that no sequence can have.
TEST(Queries, NothingToDoNeedsNoWorkspace) {
  static const int32_t kOffsets[] = {0, 0, 0};
  SmallProblem s;
  for (cuflash_problem_t* problem : {&s.decode_problem, &s.problem}) {
    problem->cu_seqlens_q = kOffsets;
    problem->total_q = SmallProblem::kBatch * SmallProblem::kLenQ;
    problem->len_q = 0;
  }
  s.decode_problem.num_splits = 5;
  s.problem.cu_seqlens_k = kOffsets;
  s.problem.total_k = SmallProblem::kBatch * SmallProblem::kLenK;
  s.problem.len_k = 0;
  size_t decode = 1, backward = 1;
  EXPECT_EQ(cuflash_decode_workspace_size(kCpu, &s.decode_problem, &s.cache, &decode),
            CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_backward_workspace_size(kCpu, &s.problem, &s.gradients, &backward),
            CUFLASH_SUCCESS);
  EXPECT_EQ(decode, 0u);
  EXPECT_EQ(backward, 0u);
  EXPECT_EQ(s.decode(), CUFLASH_SUCCESS) << cuflash_last_error();
  EXPECT_EQ(s.backward(), CUFLASH_SUCCESS) << cuflash_last_error();
  EXPECT_TRUE(s.nothing_written());
}

TEST(Queries, Explain) {
  SmallProblem s;
  size_t needed = 0;
  ASSERT_EQ(cuflash_forward_explain(kCpu, &s.problem, nullptr, 0, &needed), CUFLASH_SUCCESS);
  std::vector<char> text(needed);
  ASSERT_EQ(cuflash_forward_explain(kCpu, &s.problem, text.data(), needed, nullptr),
            CUFLASH_SUCCESS);
  const std::string json = text.data();
  EXPECT_EQ(json.size() + 1, needed);
  EXPECT_NE(json.find("\"kernel\": \"fwd_cpu\""), std::string::npos) << json;
  EXPECT_NE(json.find("\"operation\": \"forward\""), std::string::npos) << json;
  // Cut, and terminated.
  std::vector<char> shorter(11, 'x');
  ASSERT_EQ(cuflash_forward_explain(kCpu, &s.problem, shorter.data(), 10, &needed),
            CUFLASH_SUCCESS);
  EXPECT_EQ(std::string(shorter.data()), json.substr(0, 9));
  EXPECT_EQ(shorter[10], 'x');
  EXPECT_EQ(needed, json.size() + 1);
  EXPECT_EQ(cuflash_forward_explain(kCpu, &s.problem, nullptr, 10, nullptr),
            CUFLASH_ERROR_NULL_POINTER);
  std::vector<char> buffer(1 << 16);
  EXPECT_EQ(cuflash_backward_explain(kCpu, &s.problem, &s.gradients, buffer.data(), buffer.size(),
                                     nullptr),
            CUFLASH_SUCCESS);
  EXPECT_NE(std::strstr(buffer.data(), "bwd_reference_cpu"), nullptr);
  EXPECT_EQ(cuflash_decode_explain(kCpu, &s.decode_problem, &s.cache, buffer.data(), buffer.size(),
                                   nullptr),
            CUFLASH_SUCCESS);
  EXPECT_NE(std::strstr(buffer.data(), "dec_reference_cpu"), nullptr);
}

TEST(Queries, ExplainAnswersForGpusThatAreNotHere) {
  SmallProblem s;
  s.problem.q.dtype = s.problem.k.dtype = s.problem.v.dtype = s.problem.o.dtype = CUFLASH_BF16;
  std::vector<char> text(1 << 16);
  for (const int32_t arch : {75, 80, 86, 89, 90, 100, 120}) {
    s.problem.target_arch = arch;
    ASSERT_EQ(cuflash_forward_explain(nullptr, &s.problem, text.data(), text.size(), nullptr),
              CUFLASH_SUCCESS)
        << cuflash_last_error();
    const std::string json = text.data();
    for (int32_t i = 0; i < cuflash_kernel_count(); ++i) {
      cuflash_kernel_info_t info = {};
      info.struct_size = sizeof info;
      ASSERT_EQ(cuflash_kernel_info(i, &info), CUFLASH_SUCCESS);
      if (info.operation == CUFLASH_OPERATION_FORWARD && !info.on_cpu)
        EXPECT_NE(json.find(std::string("\"") + info.name + "\""), std::string::npos) << info.name;
    }
  }
  s.problem.target_arch = 42;
  EXPECT_EQ(cuflash_forward_explain(nullptr, &s.problem, text.data(), text.size(), nullptr),
            CUFLASH_ERROR_UNSUPPORTED_ARCH);
  s.problem.target_arch = 90;  // queries only
  EXPECT_EQ(s.forward(), CUFLASH_ERROR_INVALID_VALUE);
}

TEST(Queries, KernelTable) {
  std::set<std::string> names;
  ASSERT_GT(cuflash_kernel_count(), 0);
  for (int32_t i = 0; i < cuflash_kernel_count(); ++i) {
    cuflash_kernel_info_t info = {};
    info.struct_size = sizeof info;
    ASSERT_EQ(cuflash_kernel_info(i, &info), CUFLASH_SUCCESS);
    EXPECT_TRUE(names.insert(info.name).second) << info.name;
    EXPECT_STRNE(info.family, "");
    EXPECT_GE(info.operation, CUFLASH_OPERATION_FORWARD);
    EXPECT_EQ(info.threads == 0, info.on_cpu == 1) << info.name;
    EXPECT_EQ(info.struct_size, sizeof info);
    if (info.on_cpu) EXPECT_EQ(info.built, 1u) << info.name;
  }
  cuflash_kernel_info_t info = {};
  info.struct_size = sizeof info;
  EXPECT_EQ(cuflash_kernel_info(-1, &info), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuflash_kernel_info(cuflash_kernel_count(), &info), CUFLASH_ERROR_INVALID_VALUE);
  EXPECT_EQ(cuflash_kernel_info(0, nullptr), CUFLASH_ERROR_NULL_POINTER);
  info.struct_size = 4;
  EXPECT_EQ(cuflash_kernel_info(0, &info), CUFLASH_ERROR_STRUCT_SIZE);
  // A shorter struct of an older header: no more is written.
  info = {};
  info.struct_size = offsetof(cuflash_kernel_info_t, tile_m);
  info.tile_m = 12345;
  EXPECT_EQ(cuflash_kernel_info(0, &info), CUFLASH_SUCCESS) << cuflash_last_error();
  EXPECT_EQ(info.tile_m, 12345);
  EXPECT_STRNE(info.name, "");
}

TEST(Queries, PreloadAndTrimOnTheCpu) {
  SmallProblem s;
  EXPECT_EQ(cuflash_preload(kCpu, nullptr), CUFLASH_SUCCESS);
  EXPECT_EQ(cuflash_preload(kCpu, &s.problem), CUFLASH_SUCCESS) << cuflash_last_error();
  s.problem.head_dim = 0;
  EXPECT_EQ(cuflash_preload(kCpu, &s.problem), CUFLASH_ERROR_UNSUPPORTED_HEAD_DIM);
  EXPECT_EQ(cuflash_trim(kCpu), CUFLASH_SUCCESS);
}

}  // namespace
}  // namespace cuflash_test
