"""Faults that the tests must find.

Each replaces one piece of a source, which must occur exactly once, and says which tests turn red (a GoogleTest
filter without the device's name). Faults of shared headers are built for the CPU device and for CUDA, those of a
device's own sources for that device.
"""

from __future__ import annotations

from dataclasses import dataclass

KEY_RANGE = "src/attention/key_range.hpp"
SOFTMAX = "src/attention/online_softmax.hpp"
REFERENCE = "src/attention/reference.hpp"
ROWS = "src/attention/reference_rows.hpp"
FLOAT16 = "src/common/float16.hpp"
PROBLEM = "src/core/problem.hpp"
PLANS = "src/core/plans.hpp"
SPLIT = "src/core/split.cpp"
WMMA = "src/forward/wmma/kernel.cuh"

CPU_UNITS = ("src/cpu/reference.cpp",)
REFERENCE_UNITS = (
    "src/forward/reference/unit.cu",
    "src/backward/reference/unit.cu",
    "src/decode/reference/unit.cu",
    "src/merge/merge.cu",
)


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    tests: str
    """The tests that turn red."""
    units: tuple[str, ...] = ()
    """Host units to compile again; empty: those of the CPU reference (or of the CUDA kernels)."""
    devices: tuple[str, ...] = ("cpu", "cuda")


def wmma(name: str, old: str, new: str, tests: str) -> Fault:
    return Fault(f"wmma_{name}", WMMA, old, new, tests, devices=("cuda",))


FAULTS = [
    # ---- masks ----
    Fault("mask_right_edge_one_more", KEY_RANGE,
          "clamp64(centre + mask.right + 1, 0, len_k)", "clamp64(centre + mask.right + 2, 0, len_k)",
          "CasesOfMasks.B26*"),
    Fault("mask_right_edge_one_less", KEY_RANGE,
          "clamp64(centre + mask.right + 1, 0, len_k)", "clamp64(centre + mask.right, 0, len_k)",
          "CasesOfMasks.B26*"),
    Fault("window_left_edge_one_more", KEY_RANGE,
          "clamp64(centre - mask.left, 0, len_k)", "clamp64(centre - mask.left - 1, 0, len_k)",
          "CasesOfMasks.B33*"),
    Fault("window_left_edge_one_less", KEY_RANGE,
          "clamp64(centre - mask.left, 0, len_k)", "clamp64(centre - mask.left + 1, 0, len_k)",
          "CasesOfMasks.B33*"),
    Fault("rows_of_a_key_one_less", KEY_RANGE,
          "clamp64(key - shift + mask.left + 1, 0, len_q)", "clamp64(key - shift + mask.left, 0, len_q)",
          "BackwardProperty.P25_Identities*"),
    Fault("wrong_alignment", KEY_RANGE,
          "  return len_k - len_q;", "  return 0;",
          "CasesOfMasks.B26*"),
    Fault("key_tail_unmasked", KEY_RANGE,
          "clamp64(centre + mask.right + 1, 0, len_k)", "clamp64(centre + mask.right + 1, 0, len_k + 1)",
          "CasesOfTails.B46*"),
    # ---- softmax ----
    Fault("rescale_skipped", REFERENCE,
          "block_acc[slot] = block_acc[slot] * rescale + weight * to_float(v[channel]);",
          "block_acc[slot] = block_acc[slot] + weight * to_float(v[channel]);",
          "CasesOfTails.B50*"),
    Fault("sum_not_rescaled", SOFTMAX,
          "l = l * rescale + *weight * other.l;", "l = l + *weight * other.l;",
          "CasesOfTails.B50*"),
    Fault("maximum_starts_at_a_sentinel", SOFTMAX,
          "float m = negative_infinity();", "float m = -5e4f;",
          "Property.P05*"),
    Fault("exp2_for_exp", SOFTMAX,
          "expf(other.m - m_new)", "exp2f(other.m - m_new)",
          "CasesOfTails.B50*"),
    Fault("lse_in_base_2", SOFTMAX,
          "m + logf(l)", "(m + logf(l)) * 1.44269504f",
          "CasesOfDecode.B111*"),
    Fault("empty_row_not_zeroed", SOFTMAX,
          "return l == 0.0f ? 0.0f : 1.0f / l;", "return 1.0f / l;",
          "CasesOfEmptyRows.*"),
    Fault("lse_of_an_empty_row_is_finite", SOFTMAX,
          "return l == 0.0f ? negative_infinity() : m", "return l == 0.0f ? -1e30f : m",
          "CasesOfEmptyRows.*"),
    Fault("block_of_keys_not_rescaled", REFERENCE,
          "const float rescale = softmax.merge(block, &weight);\n    team.for_channels(head_dim, [&](int slot, int) {\n"
          "      acc[slot] = acc[slot] * rescale + weight * block_acc[slot];\n    });\n  }\n  store_row",
          "softmax.merge(block, &weight);\n    team.for_channels(head_dim, [&](int slot, int) {\n"
          "      acc[slot] = acc[slot] + weight * block_acc[slot];\n    });\n  }\n  store_row",
          "CasesOfTails.B50*"),
    # ---- keys, values, heads ----
    Fault("first_key_skipped", REFERENCE,
          "int64_t first = keys.begin; first", "int64_t first = keys.begin + 1; first",
          "CasesOfMasks.B26*"),
    Fault("last_key_skipped", REFERENCE,
          "min64(first + kSumBlock, keys.end)", "min64(first + kSumBlock, keys.end - 1)",
          "CasesOfMasks.B26*"),
    Fault("values_swapped_in_pairs", REFERENCE,
          "const T* v = p.v.row<T>(b, head_kv, key);",
          "const T* v = p.v.row<T>(b, head_kv, (key ^ 1) < len_k ? key ^ 1 : key);",
          "CasesOfTails.B40*"),
    Fault("values_by_the_strides_of_keys", REFERENCE,
          "const T* v = p.v.row<T>(b, head_kv, key);",
          "const T* v = static_cast<const T*>(p.v.data) + "
          "(p.k.row<T>(b, head_kv, key) - static_cast<const T*>(p.k.data));",
          "CasesOfLayouts.B72*"),
    Fault("head_modulo", PROBLEM,
          "return head_q / (heads_q / heads_kv);", "return head_q % heads_kv;",
          "CasesOfMasks.B52*"),
    Fault("lengths_ignored", PROBLEM,
          "const int64_t n = lengths_k[b];", "const int64_t n = b < 0 ? lengths_k[b] : len_k;",
          "CasesOfEmptyRows.B07*"),
    # ---- splits and merging ----
    Fault("last_key_of_a_split_lost", KEY_RANGE,
          "return {begin, min64(begin + part, range.begin + length)};",
          "return {begin, min64(begin + part - (num_splits > 1), range.begin + length)};",
          "CasesOfEmptyRows.B06*:CasesOfDecode.B110*"),
    Fault("merge_weight_missing", REFERENCE,
          "block_acc[slot] = block_acc[slot] * rescale + weight * to_float(o[channel]);",
          "block_acc[slot] = block_acc[slot] * rescale + to_float(o[channel]);",
          "MergeProperty.P03*"),
    Fault("merge_base_2_ignored", REFERENCE,
          "p.base2 ? 0.69314718055994531f : 1.0f", "1.0f",
          "MergeProperty.P03*"),
    Fault("split_results_overlap", SPLIT,
          "round_up(num_splits * rows * p.head_dim * 4, 256)",
          "round_up((num_splits - 1) * rows * p.head_dim * 4, 256)",
          "CasesOfDecode.B110*", units=(SPLIT,)),
    # ---- backward ----
    Fault("delta_zero", ROWS,
          "const float delta = reference_delta_row<T>(team, p, i.batch, i.head, i.row);",
          "const float delta = 0.0f;",
          "CasesOfBackward.B86*"),
    Fault("scale_missing_in_dq", REFERENCE,
          "store_row(team, dq, p.scale, head_dim,", "store_row(team, dq, 1.0f, head_dim,",
          "CasesOfBackward.B86*"),
    Fault("scale_missing_in_dk", REFERENCE,
          "store_row(team, dk, p.scale, head_dim,", "store_row(team, dk, 1.0f, head_dim,",
          "CasesOfBackward.B86*"),
    Fault("head_missing_in_the_group_sum", REFERENCE,
          "for (int64_t head = head_kv * group; head", "for (int64_t head = head_kv * group + (group > 1); head",
          "CasesOfMasks.B58*"),
    Fault("exp2_for_exp_in_backward", REFERENCE,
          "expf(scaled_score(p.scale, dot(team, q, k, head_dim)) - lse)",
          "exp2f(scaled_score(p.scale, dot(team, q, k, head_dim)) - lse)",
          "CasesOfBackward.B86*"),
    Fault("output_gradient_by_the_strides_of_the_output", REFERENCE,
          "const T* d_o = p.d_o.row<T>(b, head, row);",
          "const T* d_o = static_cast<const T*>(p.d_o.data) + "
          "(p.o.row<T>(b, head, row) - static_cast<const T*>(p.o.data));",
          "CasesOfLayouts.B75*"),
    # ---- rounding and memory ----
    Fault("bf16_truncated", FLOAT16,
          "(u + 0x7fffu + ((u >> 16) & 1u)) >> 16", "u >> 16",
          "Property.RoundsToNearestEven*"),
    Fault("f16_truncated", FLOAT16,
          "(rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13", "rebased >> 13",
          "Property.RoundsToNearestEven*"),
    Fault("workspace_one_row_short", PLANS,
          "(p.batch * p.heads_q * p.len_q) * sizeof(float)", "(p.batch * p.heads_q * p.len_q - 1) * sizeof(float)",
          "CasesOfBackward.B86*",
          units=("src/cpu/reference.cpp", "src/backward/reference/variants.cpp")),
    # ---- the wmma forward ----
    wmma("rescale_skipped", "      if (rescale[strip])\n", "      if (false)\n",
         "CasesOfTails.B50*:CasesOfTails.B41*"),
    wmma("sum_not_rescaled", "state.l = state.l * factor +", "state.l = state.l +",
         "CasesOfTails.B50*"),
    wmma("mask_needed_one_tile_late", "unmasked_end - key < kTileN", "unmasked_end - key < 0",
         "CasesOfMasks.B55*"),
    wmma("left_mask_skipped", "key < unmasked_begin || ", "",
         "CasesOfMasks.B36*"),
    wmma("row_of_the_mask_one_off", "visible_keys(problem.mask, shift, row, len_k)",
         "visible_keys(problem.mask, shift, row + 1, len_k)",
         "CasesOfMasks.B26*"),
    wmma("next_keys_not_loaded", "if (keys_left > kTileN) load_k(key + kTileN);",
         "if (keys_left > 2 * kTileN) load_k(key + kTileN);",
         "CasesOfTails.B50*"),
    wmma("values_of_another_tile", "load_v(key);", "load_v(key > 0 ? key - kTileN : 0);",
         "CasesOfTails.B50*:CasesOfMasks.B26*:CasesOfMasks.B55*"),
    wmma("fragments_of_v_swapped", "&s_v[n * kFragment][f * kFragment]", "&s_v[(n ^ 1) * kFragment][f * kFragment]",
         "CasesOfTails.B50*"),
    wmma("lse_without_scale", "m * problem.scale + logf(l)", "m + logf(l)",
         "CasesOfExtremeScores.B12*"),
    wmma("empty_row_not_zeroed", "empty ? 0.0f : 1.0f / l", "1.0f / l",
         "CasesOfEmptyRows.*"),
    wmma("rows_past_the_end_written", "if (row >= rows) continue;", "",
         "Property.P16*"),
    wmma("channels_past_the_end_written", "if (channel + j < head_dim) g_chunk[j]", "g_chunk[j]",
         "Property.P16*"),
    wmma("half_of_the_sum", "state[strip].l + __shfl_xor_sync(kFullWarp, state[strip].l, 1)", "state[strip].l",
         "CasesOfTails.B50*"),
]
