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
APPEND = "src/attention/append.hpp"
RAGGED = "src/attention/ragged.hpp"
SCORE = "src/attention/score.hpp"
DROPOUT = "src/attention/dropout.hpp"
PAGING = "src/attention/paging.hpp"
STORED_ROW = "src/attention/stored_row.hpp"
TILE_ROWS = "src/attention/tile_rows.hpp"
TREE_MASK = "src/attention/tree_mask.hpp"
ROWS = "src/attention/reference_rows.hpp"
FLOAT16 = "src/common/float16.hpp"
QUANTISED = "src/common/quantised.hpp"
TENSOR_VIEW = "src/common/tensor_view.hpp"
PROBLEM = "src/core/problem.hpp"
PLANS = "src/core/plans.hpp"
SPLIT = "src/core/split.cpp"
WMMA = "src/forward/wmma/kernel.cuh"
CPU_VECTOR = "src/cpu/blocked/vector.hpp"
CPU_LEVEL = "src/cpu/blocked/level.hpp"
CPU_KERNEL = "src/cpu/blocked/kernel.cpp"
CPU_TILES = "src/cpu/blocked/lane_tiles.hpp"
CPU_ROWS = "src/cpu/blocked/rows.hpp"
CPU_PAIRS = "src/cpu/blocked/pairs.hpp"
CPU_DEQUANTISE = "src/cpu/blocked/dequantise.hpp"
WGMMA = "src/forward/wgmma/kernel.cuh"
MMA = "src/forward/mma/kernel.cuh"
MMA_PAIR = "src/forward/mma/pair.cuh"
MMA_BLOCK_ORDER = "src/forward/mma/block_order.hpp"
QUAD_SOFTMAX = "src/attention/quad_softmax.cuh"
WMMA_SOFTMAX = "src/attention/wmma_softmax.cuh"
STORE_ROWS = "src/device/store_rows.cuh"
ELEMENT_PLACES = "src/device/element_places.cuh"
BWD_WMMA_MATH = "src/backward/wmma/strip_math.cuh"
BWD_WMMA_DQ = "src/backward/wmma/dq_kernel.cuh"
BWD_WMMA_DKV = "src/backward/wmma/dkv_kernel.cuh"
SCALAR = "src/forward/scalar/kernel.cuh"
BWD_SCALAR = "src/backward/scalar/kernels.cuh"
DEC_TILE = "src/decode/tile.hpp"
DEC_COMBINE = "src/decode/combine.cu"
DEC_SCALAR = "src/decode/scalar/kernel.cuh"
DEC_WMMA = "src/decode/wmma/kernel.cuh"

CPU_UNITS = ("src/cpu/reference.cpp",)
# One unit for each vector level; the build holds those of its processor.
CPU_LEVEL_UNITS = tuple(f"src/cpu/blocked/level_{level}.cpp" for level in ("baseline", "avx2", "avx512"))
REFERENCE_UNITS = (
    "src/forward/reference/unit.cu",
    "src/backward/reference/unit.cu",
    "src/decode/reference/unit.cu",
    "src/merge/merge.cu",
    "src/cache/reference/unit.cu",
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
    kernels: str = ""
    """Which generated units to compile again: a regular expression of the start of kernels' names."""


def cpu(name: str, file: str, old: str, new: str, tests: str) -> Fault:
    units = CPU_LEVEL_UNITS if file in (CPU_LEVEL, CPU_VECTOR) else (CPU_KERNEL,)
    return Fault(f"cpu_{name}", file, old, new, tests, units, devices=("cpu",))


def wmma(name: str, old: str, new: str, tests: str, file: str = WMMA) -> Fault:
    return Fault(f"wmma_{name}", file, old, new, tests, devices=("cuda",), kernels="fwd_wmma")


def mma(name: str, old: str, new: str, tests: str, file: str = MMA) -> Fault:
    return Fault(f"mma_{name}", file, old, new, tests, devices=("cuda",), kernels="fwd_mma")


def mma_pairs(name: str, old: str, new: str, tests: str, file: str = MMA_PAIR) -> Fault:
    return Fault(f"mma_pairs_{name}", file, old, new, tests, devices=("cuda",), kernels="fwd_mma_pairs")


def wgmma(name: str, old: str, new: str, tests: str) -> Fault:
    return Fault(f"wgmma_{name}", WGMMA, old, new, tests, devices=("cuda",), kernels="fwd_wgmma")


def backward_wmma(name: str, file: str, old: str, new: str, tests: str) -> Fault:
    return Fault(f"backward_wmma_{name}", file, old, new, tests, devices=("cuda",), kernels="bwd_wmma")


def scalar(name: str, old: str, new: str, tests: str) -> Fault:
    return Fault(f"scalar_{name}", SCALAR, old, new, tests, devices=("cuda",), kernels="fwd_scalar")


def backward_scalar(name: str, old: str, new: str, tests: str) -> Fault:
    return Fault(f"backward_scalar_{name}", BWD_SCALAR, old, new, tests, devices=("cuda",), kernels="bwd_scalar")


def decode(name: str, file: str, old: str, new: str, tests: str, kernels: str = "dec_(scalar|wmma)") -> Fault:
    return Fault(f"decode_{name}", file, old, new, tests, devices=("cuda",), kernels=kernels)


FAULTS = [
    # ---- offsets ----
    Fault("offsets_of_32_bits", TENSOR_VIEW,
          "static_cast<T*>(data) + batch * batch_stride + head * head_stride + row * row_stride;",
          "static_cast<T*>(data) + static_cast<uint32_t>(batch * batch_stride + head * head_stride + "
          "row * row_stride);", "FarStrides.P19*"),
    Fault("lse_offsets_of_32_bits", TENSOR_VIEW,
          "return data + batch * batch_stride + head * head_stride + row * row_stride;",
          "return data + static_cast<uint32_t>(batch * batch_stride + head * head_stride + row * row_stride);",
          "FarStrides.P19*"),
    # ---- masks ----
    Fault("mask_right_edge_one_more", KEY_RANGE,
          "centre + mask.right + 1}", "centre + mask.right + 2}",
          "CasesOfMasks.B26*"),
    Fault("mask_right_edge_one_less", KEY_RANGE,
          "centre + mask.right + 1}", "centre + mask.right}",
          "CasesOfMasks.B26*"),
    Fault("window_left_edge_one_more", KEY_RANGE,
          "{centre - mask.left,", "{centre - mask.left - 1,",
          "CasesOfMasks.B33*"),
    Fault("window_left_edge_one_less", KEY_RANGE,
          "{centre - mask.left,", "{centre - mask.left + 1,",
          "CasesOfMasks.B33*"),
    Fault("rows_of_a_key_one_less", KEY_RANGE,
          "clamp64(key - shift + mask.left + 1, 0, len_q)", "clamp64(key - shift + mask.left, 0, len_q)",
          "BackwardProperty.P25_Identities*"),
    Fault("wrong_alignment", KEY_RANGE,
          "  return len_k - len_q;", "  return 0;",
          "CasesOfMasks.B26*"),
    Fault("key_tail_unmasked", KEY_RANGE,
          "clamp64(uncut.end, 0, len_k)", "clamp64(uncut.end, 0, len_k + 1)",
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
          "dim_v, [&](int slot, int) { acc[slot] = acc[slot] * rescale + weight * block_acc[slot]; });",
          "dim_v, [&](int slot, int) { acc[slot] += 0 * rescale + weight * block_acc[slot]; });",
          "CasesOfTails.B50*"),
    # ---- keys, values, heads ----
    Fault("first_key_skipped", REFERENCE,
          "int64_t first = keys.begin; first", "int64_t first = keys.begin + 1; first",
          "CasesOfMasks.B26*"),
    Fault("last_key_skipped", REFERENCE,
          "min64(first + kSumBlock, keys.end)", "min64(first + kSumBlock, keys.end - 1)",
          "CasesOfMasks.B26*"),
    Fault("values_swapped_in_pairs", REFERENCE,
          "with_stored_row<T>(p, p.v, p.f.format.v, at,",
          "with_stored_row<T>(p, p.v, p.f.format.v, "
          "KeySlot{at.entry, (at.slot ^ 1) < r.sequence.len_k ? at.slot ^ 1 : at.slot, true},",
          "CasesOfTails.B40*"),
    Fault("values_by_the_strides_of_keys", REFERENCE,
          "with_stored_row<T>(p, p.v, p.f.format.v, at,",
          "with_stored_row<T>(p, TensorView{p.v.data, p.k.batch_stride, p.k.head_stride, p.k.row_stride, p.v.dtype}, "
          "p.f.format.v, at,",
          "CasesOfLayouts.B72*"),
    Fault("head_modulo", PROBLEM,
          "return head_q / (heads_q / heads_kv);", "return head_q % heads_kv;",
          "CasesOfMasks.B52*"),
    Fault("lengths_ignored", RAGGED,
          "if (lengths != nullptr) rows.count", "if (lengths != nullptr && b < 0) rows.count",
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
          "p.base2 ? kNaturalPerBinary : 1.0f", "1.0f",
          "MergeProperty.P03*"),
    Fault("split_results_overlap", SPLIT,
          "round_up(num_splits * rows * p.head_dim_v * 4, 256)",
          "round_up((num_splits - 1) * rows * p.head_dim_v * 4, 256)",
          "CasesOfDecode.B110*", units=(SPLIT,)),
    # ---- backward ----
    Fault("delta_zero", ROWS,
          "const float delta = reference_delta_row<T>(team, p, r);",
          "const float delta = 0.0f;",
          "CasesOfBackward.B86*"),
    Fault("scale_missing_in_dq", REFERENCE,
          "store_gradient<T>(team, dq, p.scale,", "store_gradient<T>(team, dq, 1.0f,",
          "CasesOfBackward.B86*"),
    Fault("scale_missing_in_dk", REFERENCE,
          "store_gradient<T>(team, dk, p.scale,", "store_gradient<T>(team, dk, 1.0f,",
          "CasesOfBackward.B86*"),
    Fault("head_missing_in_the_group_sum", REFERENCE,
          "for (int64_t head = head_kv * group; head", "for (int64_t head = head_kv * group + (group > 1); head",
          "CasesOfMasks.B58*"),
    Fault("exp2_for_exp_in_backward", REFERENCE,
          "expf(score.value - lse)", "exp2f(score.value - lse)",
          "CasesOfBackward.B86*"),
    Fault("output_gradient_by_the_strides_of_the_output", REFERENCE,
          "const T* d_o = p.d_o.row<T>(b, head, r.token);",
          "const T* d_o = static_cast<const T*>(p.d_o.data) + "
          "(p.o.row<T>(b, head, r.token) - static_cast<const T*>(p.o.data));",
          "CasesOfLayouts.B75*"),
    # ---- rounding and memory ----
    Fault("bf16_truncated", FLOAT16,
          "(u + 0x7fffu + ((u >> 16) & 1u)) >> 16", "u >> 16",
          "Property.RoundsToNearestEven*"),
    Fault("f16_truncated", FLOAT16,
          "(rebased + 0xfffu + ((rebased >> 13) & 1u)) >> 13", "rebased >> 13",
          "Property.RoundsToNearestEven*"),
    Fault("workspace_one_row_short", PLANS,
          "(query_extents(p).count()) * sizeof(float)", "(query_extents(p).count() - 1) * sizeof(float)",
          "CasesOfBackward.B86*",
          units=("src/cpu/reference.cpp", "src/backward/reference/variants.cpp")),
    # ---- ragged batches ----
    Fault("keys_by_the_offsets_of_queries", RAGGED,
          "rows_of_sequence(r.offsets_k, r.total_k,", "rows_of_sequence(r.offsets_q, r.total_q,",
          "CasesOfRaggedBatches.B97*"),
    Fault("last_token_of_a_sequence_lost", RAGGED,
          "if (offsets[middle] <= token)", "if (offsets[middle] < token)",
          "RaggedProperty.P29*:CasesOfRaggedBatches.B93*"),
    Fault("rows_past_the_last_offset_written", RAGGED,
          "row >= 0 && row < s.*count", "row >= 0",
          "CasesOfRaggedBatches.B95*"),
    Fault("left_padding_not_skipped", RAGGED, "k.first + pad,", "k.first,", "RaggedProperty.LeftPadding*"),
    Fault("longest_length_ignored", RAGGED,
          "min64(total - rows.first, max_len)", "total - rows.first",
          "CasesOfRaggedBatches.B98*"),
    # ---- pages ----
    Fault("page_size_of_two", PAGING, "slot32 / size", "slot32 / 2 * 2 / size", "CasesOfPages.B102*"),
    Fault("table_of_the_first_sequence", PAGING, "b * paging.table_stride", "0 * paging.table_stride",
          "CasesOfPages.B102*"),
    Fault("ids_outside_the_pool_read", PAGING,
          "page >= 0 && page < paging.num_pages}", "page >= 0}", "CasesOfPages.B101_Ids*"),
    Fault("pages_of_a_sequence_not_counted", PAGING, "* paging.page_size;", "* paging.page_size + 16;",
          "CasesOfPages.B100*"),
    # ---- quantised caches ----
    Fault("scale_of_the_first_page", STORED_ROW, "at.entry * format.page_stride", "0 * format.page_stride",
          "CasesOfQuantisedCaches.EveryShape*"),
    Fault("scale_of_the_first_head", STORED_ROW, "head * format.head_stride", "0 * format.head_stride",
          "CasesOfQuantisedCaches.EveryShape*"),
    Fault("scale_of_the_first_slot", STORED_ROW, "at.slot * format.slot_stride", "0 * format.slot_stride",
          "CasesOfQuantisedCaches.EveryShape*"),
    Fault("scale_of_the_first_group", STORED_ROW, "channel / group", "0 / group", "CasesOfQuantisedCaches.EveryShape*"),
    Fault("zero_point_ignored", STORED_ROW, "q.zero = side.zero.load(scale);", "q.zero = 0 * side.zero.load(scale);",
          "CasesOfQuantisedCaches.EveryShape*"),
    Fault("values_kept_as_keys", REFERENCE, "with_stored_row<T>(p, p.v, p.f.format.v, at,",
          "with_stored_row<T>(p, p.v, p.f.format.k, at,", "CasesOfQuantisedCaches.EveryPair*"),
    Fault("e4m3_half_as_large", QUANTISED, "(magnitude << 20) + (120u << 23)", "(magnitude << 20) + (119u << 23)",
          "CasesOfQuantisedCaches.EveryPair*"),
    Fault("e4m3_without_subnormals", QUANTISED, "static_cast<float>(magnitude) * 0.001953125f", "0.0f * magnitude",
          "CasesOfQuantisedCaches.EveryPair*"),
    Fault("high_half_first", QUANTISED, "(index % 2 * 4)", "(4 - index % 2 * 4)", "CasesOfQuantisedCaches.EveryLayout*"),
    Fault("integers_without_sign", QUANTISED, "static_cast<int32_t>(code ^ kSign) - static_cast<int32_t>(kSign)",
          "static_cast<int32_t>(code | (kSign & 0))", "CasesOfQuantisedCaches.EveryPair*"),
    # ---- tree masks ----
    Fault("bits_of_the_first_keys", TREE_MASK, "key - (len_k - tree.len)", "key", "CasesOfTrees.TreesOfTokens*"),
    Fault("bits_of_the_first_row", TREE_MASK, "row * tree.row_stride", "0 * tree.row_stride", "CasesOfTrees.ChainIsCausal*"),
    Fault("bits_of_the_first_sequence", TREE_MASK, "batch * tree.batch_stride", "0 * tree.batch_stride",
          "CasesOfTrees.TreesOfTokens*"),
    Fault("bits_of_the_first_word", TREE_MASK, "bit / 32]", "0 * bit]", "CasesOfTrees.ChainIsCausal*"),
    Fault("highest_bit_first", TREE_MASK, "word >> (bit % 32)", "word >> (31 - bit % 32)", "CasesOfTrees.ChainIsCausal*"),
    Fault("keys_before_the_bits_hidden", TREE_MASK, "if (bit < 0) return true;", "if (bit < 0) return false;",
          "CasesOfTrees.TreesOfTokens*"),
    Fault("hidden_keys_weigh_nothing_but_are_read", REFERENCE, "if (!sees_in_tree(p, r, key)) continue;",
          "if (!sees_in_tree(p, r, key)) {"
          " const T* v = p.v.row<T>(r.sequence.batch, r.head_kv, r.sequence.first_k + key);"
          " team.for_channels(dim_v, [&](int slot, int channel) { block_acc[slot] += 0.0f * to_float(v[channel]); });"
          " continue; }",
          "CasesOfTrees.HiddenKeysMayHoldNan*"),
    Fault("weights_of_hidden_keys", REFERENCE, "r.keys.contains(key) && sees_in_tree(p, r, key)", "r.keys.contains(key)",
          "Weights.*"),
    # ---- score modifiers ----
    Fault("accumulated_before_the_division", REFERENCE,
          "    const float inverse = softmax.inverse_sum();\n"
          "    team.for_channels(dim_v, [&](int slot, int) { acc[slot] *= inverse; });\n"
          "    softmax = {softmax.lse(), softmax.empty() ? 0.0f : 1.0f};\n", "",
          "FurtherOutputs.AccumulatedResultsOfAnyCapacity*", devices=("cuda",)),  # on the CPU this family has one part
    Fault("softcap_without_its_derivative", SCORE, "4.0f * u / ((1.0f + u) * (1.0f + u))}", "1.0f}", "CasesOfModifiers.B135*"),
    Fault("slopes_of_kv_heads", SCORE,
          "m.slopes_batch_stride + r.head)", "m.slopes_batch_stride + r.head / 4)", "CasesOfModifiers.B138*"),
    Fault("distance_one_off", SCORE,
          "r.centre > key ? r.centre - key", "r.centre > key ? r.centre - key - 1", "CasesOfModifiers.B137*"),
    Fault("bias_of_another_row", SCORE, "r.row * m.bias.row_stride", "0 * m.bias.row_stride", "CasesOfModifiers.B10*"),
    Fault("masking_bias_not_guarded", REFERENCE,
          "score.value == negative_infinity() ? 0.0f : expf", "expf", "CasesOfModifiers.B10*"),
    Fault("sink_in_every_part", REFERENCE,
          "p.f.sinks.data != nullptr && split == 0", "p.f.sinks.data != nullptr", "CasesOfModifiers.B141*"),
    Fault("sink_gradient_dropped", REFERENCE, "sum.add(-expf(sink - lse)", "sum.add(-0.0f", "CasesOfModifiers.B141*"),
    Fault("dropout_of_the_sum_too", REFERENCE,
          "weight *= r.dropout.factor(key);", "block.l *= r.dropout.factor(key), weight *= r.dropout.factor(key);",
          "CasesOfModifiers.B143*"),
    Fault("dropout_mask_of_one_head", DROPOUT,
          "static_cast<uint32_t>(head_of_batch)};", "0u * static_cast<uint32_t>(head_of_batch)};",
          "CasesOfModifiers.B143*"),
    Fault("dropout_missing_in_dv", REFERENCE,
          "const float weight = pair.p * pair.kept;", "const float weight = pair.p;", "CasesOfModifiers.B143*"),
    Fault("bias_gradient_of_one_row", REFERENCE,
          "repeats(bias.row_stride, row, p.len_q)", "repeats(1, row, p.len_q)", "ModifierProperty.Gradients*"),
    # ---- outputs ----
    Fault("accumulation_overwrites", REFERENCE,
          "if (p.f.accumulate_o) {", "if (p.f.accumulate_o && p.len_q < 0) {", "FurtherOutputs.AccumulatedResults*"),
    Fault("gradients_overwritten", REFERENCE,
          "x[slot] * factor + to_float(out[channel])", "x[slot] * factor", "FurtherOutputs.AccumulatedGradients*"),
    Fault("gradient_of_the_lse_added", REFERENCE,
          "delta - *p.f.d_lse.at(b, r.head, r.token)", "delta", "FurtherOutputs.DeltaOutAndIn*"),
    Fault("given_delta_not_read", REFERENCE,
          "delta = *p.f.delta.at(b, r.head, r.token);", "delta = 0;", "FurtherOutputs.DeltaOutAndIn*"),
    Fault("weights_of_other_rows", ROWS,
          "out.chosen != nullptr ? out.chosen[i.row] : i.row", "i.row", "Weights.*"),
    # ---- append ----
    Fault("append_one_slot_late", APPEND, "length < 0 ? -1 : length + t.index;", "length < 0 ? -1 : length + t.index + 1;",
          "CasesOfAppend.B105*"),
    Fault("append_after_a_negative_length", APPEND, "length < 0 ? -1 : length + t.index;", "length + t.index;",
          "CasesOfAppend.SkippedTokens*"),
    Fault("append_past_max_len", APPEND, "min64(p.max_len, cache_capacity(p.paging, p.max_len, t.batch))",
          "cache_capacity(p.paging, p.max_len, t.batch)", "CasesOfAppend.SkippedTokens*"),
    Fault("append_to_a_slot_past_the_last", APPEND, "slot >= p.entries * p.entry_slots", "slot > p.entries * p.entry_slots",
          "CasesOfAppend.SkippedTokens*"),
    Fault("append_pages_and_slots_swapped", APPEND, "{slot / p.entry_slots, slot % p.entry_slots, true}",
          "{slot % p.entry_slots, slot / p.entry_slots, true}", "CasesOfAppend.PositionsAndSlotMappings*"),
    Fault("append_into_q", APPEND, "p.q_out.row<T>(t.batch, head, t.index)", "p.q.row<T>(t.batch, head, t.index)",
          "CasesOfAppend.Rotation*"),
    Fault("rotation_the_other_way", APPEND, "channel == lower ? along - across : along + across",
          "channel == lower ? along + across : along - across", "CasesOfAppend.Rotation*"),
    Fault("rotation_with_a_row_that_is_not_normed", APPEND, "normed(other) * rotary_.sin", "to_float(row_[other]) * rotary_.sin",
          "CasesOfAppend.Norms*"),
    Fault("rotation_by_the_last_position", APPEND, "first_angle_ = position * (rotary_.dim / 2);",
          "first_angle_ = (position > 0 ? position - 1 : 0) * (rotary_.dim / 2);", "CasesOfAppend.Rotation*"),
    Fault("query_without_an_angle_kept", APPEND, "out[c] = from_float<T>(0.0f);", "out[c] = p.q.row<T>(t.batch, head, t.index)[c];",
          "CasesOfAppend.PositionsOutsideTheTable*"),
    Fault("norm_without_epsilon", APPEND, " + epsilon * factor * factor", "", "CasesOfAppend.Norms*"),
    Fault("norm_of_squares_out_of_range", APPEND, "if (!(mean >= 0x1p-60f && mean <= 0x1p120f)) {", "if (dim < 0) {",
          "CasesOfAppend.NormsOfExtremeRows*"),
    Fault("in_place_rotation_of_what_is_rotated", APPEND,
          "const float lower = row[c], upper = row[other];\n    out[c] = from_float<T>(lower);",
          "const float lower = row[c];\n    out[c] = from_float<T>(lower);\n    const float upper = row[other];",
          "CasesOfAppend.QueriesInPlace*"),
    Fault("values_by_the_scales_of_keys", APPEND, "quantised_row(p.format, p.format.v, p.cache_v,",
          "quantised_row(p.format, p.format.k, p.cache_v,", "CasesOfAppend.QuantisedCaches*"),
    Fault("halves_of_a_byte_swapped", APPEND, "first | (two ? second << 4 : byte & 0xf0u)",
          "first << 4 | (two ? second : byte & 0xfu)", "CasesOfAppend.QuantisedCaches*"),
    Fault("unused_half_of_a_byte_written", APPEND, "two ? second << 4 : byte & 0xf0u", "second << 4",
          "CasesOfAppend.QuantisedCaches*"),
    Fault("two_channels_at_once_unaligned", APPEND, "% sizeof(Both) == 0", "% sizeof(Code) == 0", "CasesOfAppend.B106*",
          devices=("cuda",)),
    # ---- the wmma forward ----
    wmma("rescale_skipped", "      if (rescale[strip])\n", "      if (false)\n",
         "CasesOfTails.B50*:CasesOfTails.B41*"),
    wmma("sum_not_rescaled", "state.l = state.l * factor +", "state.l = state.l +",
         "CasesOfTails.B50*", WMMA_SOFTMAX),
    wmma("mask_needed_one_tile_late", "unmasked_end - key < kTileN", "unmasked_end - key < 0",
         "CasesOfMasks.B55*"),
    wmma("left_mask_skipped", "key < unmasked_begin || ", "",
         "CasesOfMasks.B36*"),
    wmma("row_of_the_mask_one_off", "visible_keys(problem.mask, shift, row, sequence.len_k)",
         "visible_keys(problem.mask, shift, row + 1, sequence.len_k)",
         "CasesOfMasks.B26*"),
    wmma("next_keys_not_loaded", "if (keys_left > kTileN) load_k(key + kTileN);",
         "if (keys_left > 2 * kTileN) load_k(key + kTileN);",
         "CasesOfTails.B50*"),
    wmma("values_of_another_tile", "load_v(key);", "load_v(key > 0 ? key - kTileN : 0);",
         "CasesOfTails.B50*:CasesOfMasks.B26*:CasesOfMasks.B55*"),
    wmma("fragments_of_v_swapped", "&s_v[n * kFragment][f * kFragment]", "&s_v[(n ^ 1) * kFragment][f * kFragment]",
         "CasesOfTails.B50*"),
    wmma("lse_without_scale", "lse_of(m, factor_of_scores(problem), l)", "lse_of(m, 1, l)",
         "CasesOfExtremeScores.B12*"),
    wmma("empty_row_not_zeroed", "empty ? 0.0f : factor_of_outputs(problem) / l", "factor_of_outputs(problem) / l",
         "CasesOfEmptyRows.*"),
    wmma("sequences_from_the_first_row", "problem.q.template row<const Element>(b, head, sequence.first_q + tile_row)",
         "problem.q.template row<const Element>(b, head, tile_row)", "CasesOfRaggedBatches.B88*"),
    wmma("finished_scores_scaled", "factor_of_scores(problem) * kLog2E", "problem.scale * kLog2E",
         "CasesOfModifiers.B137*"),
    wmma("sink_in_both_lanes", "sink != negative_infinity() && lane % 2 == 0", "sink != negative_infinity()",
         "CasesOfModifiers.B141*"),
    wmma("every_second_score_modified", "column < Config::kTileN; column += 2)\n    s_row[column] = seen",
         "column < Config::kTileN; column += 4)\n    s_row[column] = seen", "CasesOfModifiers.B137*", WMMA_SOFTMAX),
    wmma("weights_not_dropped", "if (!row.keeps(column))", "if (false)", "CasesOfModifiers.B143*", WMMA_SOFTMAX),
    wmma("rows_past_the_end_written", "if (row >= rows) continue;", "",
         "Property.P16*", STORE_ROWS),
    wmma("channels_past_the_end_written", "if (channel + j < channels) g_chunk[j]", "g_chunk[j]",
         "Property.P16*", STORE_ROWS),
    wmma("half_of_the_sum", "state[strip].l + __shfl_xor_sync(kFullWarp, state[strip].l, 1)", "state[strip].l",
         "CasesOfTails.B50*"),

    # ---- the wmma backward ----
    backward_wmma("delta_dropped", BWD_WMMA_MATH, "return p * (d_p - delta);", "return p * d_p;",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("lse_in_base_2", BWD_WMMA_MATH, "(score - lse(n, e)) * kLog2E", "score * kLog2E - lse(n, e)",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("mask_dropped", BWD_WMMA_MATH, "kMasked && !seen(n, e) ? 0.0f : p", "p",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("last_fragment_of_the_tile_dropped", BWD_WMMA_MATH, "for (int n = 0; n < kInner; ++n) {",
                  "for (int n = 0; n < kInner - 1; ++n) {",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("pairs_swapped", ELEMENT_PLACES, "{matrix.x[e], matrix.x[e + 1]}", "{matrix.x[e + 1], matrix.x[e]}",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("dq_sees_one_key_more", BWD_WMMA_DQ, "column < s.seen.end[row]", "column <= s.seen.end[row]",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("dq_without_scale", BWD_WMMA_DQ, "multiply_by(dq, problem.scale);", "multiply_by(dq, 1.0f);",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("dq_of_the_last_keys", BWD_WMMA_DQ, "s.k[stage][0] + role", "s.k[stage ^ 1][0] + role",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("dq_statistics_of_another_strip", BWD_WMMA_DQ, "[strip * kFragment + places.row(e)];", "[places.row(e)];",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("dkv_sees_one_row_less", BWD_WMMA_DKV, "s.seen.begin[i] <= column", "s.seen.begin[i] < column",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("dk_without_scale", BWD_WMMA_DKV, "if (role == kGradients) multiply_by(total, problem.scale);", "",
                  "Corners.Accurate/cuda_bwd_wmma_*"),
    backward_wmma("dkv_of_one_head", BWD_WMMA_DKV, "(int64_t{head_kv} + 1) * group;", "head_kv * group + 1;",
                  "CasesOfMasks.B58*"),
    backward_wmma("dv_from_queries", BWD_WMMA_DKV, "role == kWeights ? s_d_o : s_q);", "s_q);",
                  "Corners.Accurate/cuda_bwd_wmma_*"),

    # ---- the scalar kernels ----
    scalar("rescale_skipped", "fmaf(o[i][first + g][e], rescale[i], tile_o[i][g][e])", "o[i][first + g][e] + tile_o[i][g][e]",
           "CasesOfTails.B50*"),
    scalar("sum_not_rescaled", "l = l * rescale + sum;", "l = l + sum;",
           "CasesOfTails.B50*"),
    scalar("mask_needed_one_tile_late", "unmasked_end - key < kTileN", "unmasked_end - key < 0",
           "CasesOfMasks.B55*"),
    scalar("left_mask_skipped", "key < unmasked_begin || ", "",
           "CasesOfMasks.B36*"),
    scalar("row_of_the_mask_one_off", "visible_keys(problem.mask, shift, row, sequence.len_k)",
           "visible_keys(problem.mask, shift, row + 1, sequence.len_k)",
           "CasesOfMasks.B26*"),
    scalar("nothing_seen_yet_is_nan", "m_new == negative_infinity() ? 0.0f : m_new", "m_new",
           "CasesOfEmptyRows.*"),
    scalar("sum_of_one_thread", "reduce_row(state[i].l, [](float a, float b) { return a + b; })", "state[i].l",
           "CasesOfTails.B50*"),
    scalar("rows_past_the_end_written", "if (row >= sequence.len_q) continue;", "",
           "Property.P16*"),
    scalar("sequences_from_the_first_key", "const int64_t first_key = sequence.first_k + keys.any.begin;",
           "const int64_t first_key = keys.any.begin;", "CasesOfRaggedBatches.B88*"),
    scalar("sink_in_all_threads", "sink != negative_infinity() && thread.column == 0", "sink != negative_infinity()",
           "CasesOfModifiers.B141*"),
    scalar("scores_not_modified", "seen.contain(column) ? modified.score(x, column) : negative_infinity()",
           "seen.contain(column) ? rounded_product(problem.scale, x) : negative_infinity()", "CasesOfModifiers.B137*"),
    scalar("weights_not_dropped", "if (!modified.keeps(thread.column + j * WarpGrid::kColumns))", "if (false)",
           "CasesOfModifiers.B143*"),
    Fault("dropped_rows_not_scaled", TILE_ROWS, "return dropout.active ? dropout.kept : 1.0f;", "return 1.0f;",
          "CasesOfModifiers.B143*", devices=("cuda",), kernels="fwd_(wmma|scalar)"),
    backward_scalar("delta_dropped", "weight * (d_p - delta)", "weight * d_p",
                    "Corners.Accurate/cuda_bwd_scalar_*"),
    backward_scalar("dq_mask_dropped", "if (!seen.contain(place.column(j))) d_s[i][j] = 0;",
                    "if (!seen.contain(place.column(j))) d_s[i][j] *= 1;",
                    "Corners.Accurate/cuda_bwd_scalar_*"),
    backward_scalar("dkv_mask_dropped", "if (!seen.contain(place.column(j))) p[i][j] = 0;",
                    "if (!seen.contain(place.column(j))) p[i][j] *= 1;",
                    "Corners.Accurate/cuda_bwd_scalar_*"),
    backward_scalar("dq_without_scale", "store_gradient<Element>(problem, dq, problem.scale,",
                    "store_gradient<Element>(problem, dq, 1.0f,",
                    "Corners.Accurate/cuda_bwd_scalar_*"),
    backward_scalar("delta_of_the_first_rows", "g_head_delta[row + column]", "g_head_delta[column]",
                    "Corners.Accurate/cuda_bwd_scalar_*"),
    backward_scalar("dkv_of_one_head", "head < (head_kv + 1) * group;", "head < head_kv * group + 1;",
                    "CasesOfMasks.B58*"),
    # ---- decode ----
    decode("one_head_for_all_of_a_group", DEC_TILE, "t.head_kv * group + r % group", "t.head_kv * group",
           "Property.P18*"),
    decode("row_sees_the_keys_of_all", DEC_TILE, "visible_keys(p.mask, t.shift, row_of(p, t, row).query, t.len_k)",
           "t.keys", "CasesOfDecode.B116*"),
    decode("scalar_mask_of_the_first_pass", DEC_SCALAR, "seen[r].contains(key + n * Config::kPassKeys)",
           "seen[r].contains(key)", "CasesOfEmptyRows.B07*"),
    decode("scalar_sums_counted_twice", DEC_SCALAR, "      sums[r] = Sums();\n", "", "CasesOfDecode.B108*"),
    decode("scalar_warps_not_rescaled", DEC_SCALAR, "weight[w] = weight_of(s.m[w][r], m, scale_log2);",
           "weight[w] = 1;", "CasesOfDecode.B108*"),
    decode("wmma_tail_unmasked", DEC_WMMA, "unmasked_end < key + kTileN", "unmasked_end < key",
           "CasesOfEmptyRows.B07*"),
    decode("wmma_keys_for_values", DEC_WMMA, "load(filled % kSlots, g_v, problem.v.row_stride, head_dim_v, key);",
           "load(filled % kSlots, g_k, problem.k.row_stride, head_dim_v, key);", "CasesOfDecode.B108*"),
    decode("wmma_warps_not_rescaled", DEC_WMMA, "weight_of(state.m, m, scale_log2) / l", "1.0f / l",
           "CasesOfDecode.B108*"),
    Fault("decode_parts_not_weighted", DEC_COMBINE, "empty ? 0.0f : expf(lse - m)", "empty ? 0.0f : 1.0f",
          "CasesOfDecode.B108*", units=(DEC_COMBINE,), devices=("cuda",)),
    Fault("decode_part_of_an_empty_row_read", DEC_COMBINE, "const bool empty = lse == negative_infinity();",
          "const bool empty = part >= num_parts;", "CasesOfEmptyRows.B03*", units=(DEC_COMBINE,), devices=("cuda",)),
    # ---- the cpu family ----
    cpu("mask_right_edge_one_more", CPU_TILES, "below(end - 32 * w)", "below(end + 1 - 32 * w)",
        "CasesOfMasks.B26*"),
    cpu("mask_left_edge_one_more", CPU_TILES, "~below(begin - 32 * w)", "~below(begin - 1 - 32 * w)",
        "CasesOfMasks.B33*"),
    cpu("tile_of_the_diagonal_unmasked", CPU_TILES,
        "all_.begin <= begin && end <= all_.end", "all_.begin <= begin",
        "CasesOfMasks.B26*"),
    cpu("later_steps_masked_as_the_first", CPU_LEVEL, "words[step / 32] >> step % 32", "words[0] >> step % 32",
        "CasesOfMasks.B55*"),
    cpu("rescale_skipped", CPU_LEVEL,
        "multiply_add(load(out), load(factors + v * kWidth), sum[r][v])", "load(out) + sum[r][v]",
        "CasesOfTails.B50*"),
    cpu("sum_not_rescaled", CPU_LEVEL,
        "multiply_add(load(l->x + v * kWidth), factor, sum)", "load(l->x + v * kWidth) + sum",
        "CasesOfTails.B50*"),
    cpu("empty_row_is_not_a_number", CPU_LEVEL,
        "top == lowest ? broadcast(0.0f) : top", "top",
        "CasesOfEmptyRows.*"),
    cpu("lower_half_of_ln_2_missing", CPU_VECTOR,
        "r = multiply_add(n, broadcast(2.12194440e-4f), r);", "",
        "CasesOfTails.B50*"),
    cpu("bf16_truncated", CPU_VECTOR,
        "u + 0x7fffu + ((u >> 16) & 1u)", "u",
        "Property.RoundsToNearestEven*"),
    cpu("last_tile_dropped", CPU_TILES,
        "begin < any_.end; begin = end", "begin + kSteps <= any_.end; begin = end",
        "CasesOfMasks.B26*"),
    cpu("lse_in_base_2", CPU_KERNEL,
        "= softmax[lane].lse();", "= softmax[lane].lse() * 1.44269504f;",
        "CasesOfDecode.B111*"),
    cpu("keys_of_the_first_head", CPU_ROWS,
        "rows.load(t, s_.batch, head_kv_, first_, count_, panel);",
        "rows.load(t, s_.batch, 0, first_, count_, panel);",
        "CasesOfMasks.B52*"),
    cpu("heads_of_a_group_by_modulo", CPU_KERNEL,
        "int64_t head = tile.head_kv * group; head < (tile.head_kv + 1) * group; ++head",
        "int64_t head = tile.head_kv; head < p.heads_q; head += p.heads_q / group",
        "CasesOfMasks.B58*"),
    cpu("delta_zero", CPU_KERNEL,
        "= lane_delta.x[lane];", "= 0.0f;",
        "CasesOfBackward.B86*"),
    cpu("scale_missing_in_dk", CPU_KERNEL,
        "qk.store_gradient(dk, p.scale,", "qk.store_gradient(dk, 1.0f,",
        "CasesOfBackward.B86*"),
    cpu("keys_of_the_last_split_lost", CPU_KERNEL,
        "part.split, part.num_splits, p.least_part()",
        "part.split, part.num_splits + (part.num_splits > 1), p.least_part()",
        "CasesOfEmptyRows.B06*"),
    cpu("delta_over_the_tiles", CPU_KERNEL,
        "behind(context, backward_scratch_bytes(p, context.capabilities))", "behind(context, 0)",
        "CasesOfBackward.B86*"),
    cpu("no_tile_for_the_end_of_a_sequence", CPU_TILES, "lanes_of_row_ / kLanes + b;", "lanes_of_row_ / kLanes;",
        "CasesOfRaggedBatches.B87*"),
    cpu("sequences_without_their_place", CPU_ROWS, "first_ = s_.first_k + first", "first_ = first",
        "CasesOfRaggedBatches.B97*"),
    cpu("parts_of_packed_rows_by_batches", CPU_KERNEL, "if (passed.parts.batch == 1)", "if (false)",
        "CasesOfPages.B103*/cpu_blocked"),
    cpu("scaled_before_the_cap_too", CPU_KERNEL, "modified ? 1.0f : p.scale, scores", "p.scale, scores",
        "Features.Accurate/cpu_fwd_cpu*"),
    cpu("slope_of_the_cap_is_1", CPU_KERNEL, "if (caps) multiply(count, derivatives_, d_p);", "",
        "Features.Accurate/cpu_bwd_cpu*"),
    cpu("pairs_of_the_wrong_row", CPU_PAIRS, "f(rows_[i], first_key_ + j, lane, step)",
        "f(rows_[0], first_key_ + j, lane, step)", "CasesOfModifiers.B138*"),
    cpu("nothing_dropped_in_dp", CPU_KERNEL, "multiply(count, kept_, d_p);", "",
        "Features.Accurate/cpu_bwd_cpu*"),
    cpu("nothing_dropped_in_dv", CPU_KERNEL, "if (drops) multiply(count, kept_, scores);", "",
        "CasesOfModifiers.B143_DropoutOfForwardAndBackward*"),
    cpu("sink_in_every_part", CPU_KERNEL, "p.f.sinks.data != nullptr && part.split == 0", "p.f.sinks.data != nullptr",
        "CasesOfModifiers.B141_B142*"),
    cpu("no_gradients_of_biases", CPU_KERNEL, "for_each_index(context, modifier_gradients(p),",
        "for_each_index(context, 0 * modifier_gradients(p),", "ModifierProperty.GradientsOfRepeatedBiases*"),
    cpu("lse_gradient_added", CPU_KERNEL, "delta.x[lane] -= *p.f.d_lse", "delta.x[lane] += *p.f.d_lse",
        "Features.Accurate/cpu_bwd_cpu*"),
    cpu("row_masked_by_a_bias_is_not_a_number", CPU_KERNEL, "lse == negative_infinity() ? 0.0f : lse", "lse",
        "CasesOfModifiers.B10*"),
    cpu("scratch_for_keys_alone", CPU_KERNEL, "leading(max64(p.head_dim, p.head_dim_v))", "leading(p.head_dim)",
        "FurtherOutputs.HeadDimsOfTheValues*"),
    cpu("gradients_overwritten", CPU_ROWS, "lanes[n] * scale + there[n]", "lanes[n] * scale",
        "FurtherOutputs.AccumulatedGradients*"),
    cpu("outputs_overwritten", CPU_KERNEL, "if (p.f.accumulate_o && part.num_splits == 1)", "if (false)",
        "FurtherOutputs.AccumulatedResults*"),
    cpu("delta_not_returned", CPU_KERNEL, "else if (p.f.delta.data != nullptr)", "else if (false)",
        "FurtherOutputs.DeltaOutAndIn*"),
    cpu("keys_outside_the_pool_seen", CPU_ROWS,
        "for (int lane = 0; lane < kLanes && !slots_[i].valid; ++lane) seen.hide(lane, i);", "",
        "CasesOfPages.B101_IdsOutsideThePool*/cpu_blocked"),
    cpu("tree_never_looked_at", CPU_PAIRS, "pairs.end_key() <= len_k - p.f.tree.len", "pairs.end_key() <= len_k",
        "CasesOfTrees.TreesOfTokens*/cpu_blocked"),
    cpu("scale_of_the_first_group", CPU_DEQUANTISE, "row.scale_of(first)", "row.scale_of(0)",
        "CasesOfQuantisedCaches.EveryShapeOfScales*/cpu_blocked"),

    # ---- the mma forward ----
    mma("rescale_skipped", "              scale_rows(o[strip], factor);\n", "", "CasesOfExtremeScores.B23*"),
    mma("sum_not_rescaled", "rows.l[row] * factor[row] + sum[row]", "rows.l[row] + sum[row]",
        "CasesOfExtremeScores.B23*", QUAD_SOFTMAX),
    mma("maximum_never_raised", "if (!(sum[row] <= fminf(kOutweighs * rows.l[row], kMaxSum)))", "if (sum[row] != sum[row])",
        "CasesOfExtremeScores.B23*", QUAD_SOFTMAX),
    mma("sums_without_a_limit", "constexpr float kMaxSum = 256;", "constexpr float kMaxSum = 1e30f;",
        "CasesOfExtremeScores.B22_Large*", QUAD_SOFTMAX),
    mma("rows_raised_with_their_neighbours", "asks >> row & 1 ? greatest : rows.m[row]", "greatest",
        "Property.P28_Rows*", QUAD_SOFTMAX),
    mma("mask_needed_one_tile_late", "unmasked_end - key < kTileN", "unmasked_end - key < 0", "CasesOfMasks.B55*"),
    mma("left_mask_skipped", "key < unmasked_begin || ", "", "CasesOfMasks.B36*:Corners.Accurate/cuda_fwd_mma_*"),
    mma("row_of_the_mask_one_off", "8 * r + static_cast<int>(lane / 4);", "8 * r + static_cast<int>(lane / 4) + 1;",
        "CasesOfMasks.B26*"),
    mma("tile_of_the_diagonal_left_out", "end <= 1 - Config::kWarpRows", "end <= 1", "CasesOfMasks.B26*"),
    mma("next_keys_not_loaded", "} else if (keys_left > kTileN) {", "} else if (keys_left > 2 * kTileN) {",
        "CasesOfTails.B50*:CasesOfMasks.B55*"),
    mma("stage_of_another_tile", "key / kTileN % 2", "0 * key", "CasesOfTails.B50*:CasesOfMasks.B55*"),
    mma("rows_of_v_swapped", "Config::Layout::advance(s_v_lane, step, n)", "Config::Layout::advance(s_v_lane, step ^ 1, n)",
        "CasesOfTails.B50*"),
    mma("lse_without_scale", "lse_of(rows[strip].m[r], factor_of_scores(problem), l)", "lse_of(rows[strip].m[r], 1, l)",
        "CasesOfExtremeScores.B12*"),
    mma("empty_row_not_zeroed", "empty ? 0.0f : factor_of_outputs(problem) / l", "factor_of_outputs(problem) / l",
        "CasesOfEmptyRows.*"),
    mma("quarter_of_the_sum", "quad_sum(rows[strip].l[r])", "rows[strip].l[r]", "CasesOfTails.B50*"),
    mma("sequences_from_the_first_row", "problem.q.template row<const Element>(b, head, sequence.first_q + tile_row)",
        "problem.q.template row<const Element>(b, head, tile_row)", "CasesOfRaggedBatches.B88*"),
    mma("finished_scores_scaled", "quad_scale_log2(factor_of_scores(problem))", "quad_scale_log2(problem.scale)",
        "CasesOfModifiers.B137*"),
    mma("sink_in_all_lanes", "sink != negative_infinity() && lane % 4 == 0", "sink != negative_infinity()",
        "CasesOfModifiers.B141*"),
    mma("weights_not_dropped", "if (modified.keeps(column)) kept_of_strip", "kept_of_strip", "CasesOfModifiers.B143*"),
    mma("rows_past_the_end_written", "if (row >= rows || channel >= channels) continue;",
        "if (channel >= channels) continue;", "Property.P16*"),
    mma("rows_of_a_whole_tile_not_permuted", "Layout::offset(first + row % 8, chunk) + row / 8 * (8 * Layout::kRowBytes)",
        "Layout::offset(first, chunk) + row * Layout::kRowBytes", "Corners.Accurate/cuda_fwd_mma_*"),
    mma("every_group_the_first", "group * group_heads.divisor + in_group", "in_group", "CasesOfLimits.MoreKeysThanL2*",
        MMA_BLOCK_ORDER),
    mma("keys_of_the_first_head", "heads_of_kv.quotient(head)}", "0}", "Corners.Accurate/cuda_fwd_mma_*", MMA_BLOCK_ORDER),

    mma_pairs("partner_not_waited_for", "s.asks[warp] = asks;\n    meet();", "s.asks[warp] = asks;",
              "Corners.Accurate/cuda_fwd_mma_pairs_*"),
    mma_pairs("rows_of_the_partner_not_raised", "(own.asks | other.asks) != 0", "own.asks != 0",
              "Corners.Accurate/cuda_fwd_mma_pairs_*"),
    mma_pairs("maximum_of_half_the_keys", "fmaxf(own.value, other.value)", "own.value",
              "CasesOfExtremeScores.B23*:Corners.Accurate/cuda_fwd_mma_pairs_*"),
    mma_pairs("strips_of_the_partner_swapped", "s.weights[partner()][strip * kSteps + step]",
              "s.weights[partner()][(strip ^ 1) * kSteps + step]", "Corners.Accurate/cuda_fwd_mma_pairs_*"),
    mma_pairs("half_of_the_sum", "l += Pair<Config>{s.q.pairs, warp, lane}.sum_of_partner(strip, r);", "l += 0;",
              "Corners.Accurate/cuda_fwd_mma_pairs_*", MMA),
    mma_pairs("sink_in_both_warps", "lane % 4 == 0 && sharer == 0;", "lane % 4 == 0;",
              "CasesOfModifiers.*:Draws.Accurate/cuda_fwd_mma_pairs_*", MMA),
    mma_pairs("mask_of_the_other_keys", "min(end + i, keys_left)) - first}", "min(end + i, keys_left))}",
              "CasesOfMasks.B26*:Corners.Accurate/cuda_fwd_mma_pairs_*", MMA),
    mma_pairs("scores_of_other_keys_modified", "keys.any.begin + key + own_keys, lane", "keys.any.begin + key, lane",
              "CasesOfModifiers.B143*:Draws.Accurate/cuda_fwd_mma_pairs_*", MMA),
    mma_pairs("lse_of_the_other_strip", "strip % kSharers == static_cast<int>(sharer)", "strip == 0",
              "Corners.Accurate/cuda_fwd_mma_pairs_*", MMA),

    # ---- the wgmma forward ----
    Fault("counter_not_cleared", "src/api/attention.cpp", "choice.plan.counts_tiles && !checked->problem.workspace_prepared",
          "false", "CasesOfRaggedBatches.WorkspaceWithGarbage*", ("src/api/attention.cpp",), devices=("cuda",), kernels="fwd_wgmma"),
    Fault("workspace_over_its_counter", "src/api/attention.cpp", "static_cast<char*>(workspace) + kWorkspaceHeader",
          "static_cast<char*>(workspace)", "CasesOfRaggedBatches.WorkspaceWithGarbage*", ("src/api/attention.cpp",), devices=("cuda",),
          kernels="fwd_wgmma"),
    wgmma("right_edge_unmasked", "return low_bits(before(end)) & ~low_bits(before(begin));",
          "return ~low_bits(before(begin));",
          "CasesOfMasks.B55*"),
    wgmma("mask_needed_one_tile_late", "all_end - key >= kTileN", "all_end - key >= 0",
          "CasesOfMasks.B55*"),
    wgmma("left_mask_skipped", "key >= all_begin && ", "",
          "Corners.Accurate/cuda_fwd_wgmma_*"),
    wgmma("rescale_skipped", "if (!kFirst) scale_rows(o, factor);", "",
          "CasesOfExtremeScores.B23*"),
    wgmma("sum_not_rescaled", "state.l[row] * factor[row] + sum[row]", "state.l[row] + sum[row]",
          "CasesOfExtremeScores.B23*"),
    wgmma("sums_without_a_limit", "constexpr float kMaxSum = 256;", "constexpr float kMaxSum = 1e30f;",
          "CasesOfExtremeScores.B22_Large*"),
    wgmma("maximum_never_raised", "if (!(sum[row] <= fminf(kOutweighs * state.l[row], kMaxSum)))", "if (sum[row] != sum[row])",
          "CasesOfExtremeScores.B23*"),
    wgmma("rows_raised_with_their_neighbours", "asks >> row & 1 ? greatest : state.m[row]", "greatest",
          "Property.P28_Rows*"),
    wgmma("values_of_another_tile", "shared.v.tile(kv_tile + i - 1));", "shared.v.tile(kv_tile + i));",
          "CasesOfMasks.B55*:CasesOfExtremeScores.B23*"),
    wgmma("last_tile_of_a_section_lost", "if (place < rest) f(first + place);", "if (place + 1 < rest) f(first + place);",
          "CasesOfMasks.B26*"),
    wgmma("next_section_not_begun", "first < order.tiles; ++section", "first < order.tiles && section < 1; ++section",
          "CasesOfLimits.MoreKeysThanL2*"),
    wgmma("heads_taken_modulo", "static_cast<int>(head / group)", "static_cast<int>(head % problem.heads_kv)",
          "CasesOfMasks.B52*"),
    wgmma("lse_without_scale", "lse_of(state.m[r], factor_of_scores(problem), l)", "lse_of(state.m[r], 1, l)",
          "CasesOfExtremeScores.B12*"),
    wgmma("quarter_of_the_sum", "const float l = quad_sum(state.l[r]);", "const float l = state.l[r];",
          "CasesOfTails.B50*"),
    wgmma("columns_of_o_swapped", "(odd ? x[i] : x[i + 1]) = other;", "(odd ? x[i + 1] : x[i]) = other;",
          "CasesOfTails.B40*:CasesOfTails.B41*"),
    wgmma("rows_of_the_next_sequence_written", "const bool valid = row + 8 * r < rows;", "const bool valid = true;",
          "RaggedProperty.GarbageOffsets*:Property.P16*"),
    wgmma("values_past_the_end_not_cleared", "clear_rows<Config>(shared.v.tile(kv_tile + i), valid, thread);", "",
          "CasesOfRaggedBatches.B96*"),
    wgmma("tiles_of_sequences_not_summed", "before += sequence >> kSequenceBits;", "",
          "CasesOfRaggedBatches.B88*"),
    wgmma("sequences_by_their_place", "before << kSequenceBits | (sequence & low)", "before << kSequenceBits | i",
          "CasesOfRaggedBatches.B88*"),
    wgmma("equal_sequences_at_one_place", "(s_keys[other] == keys && other < b)", "false",
          "CasesOfRaggedBatches.B87*"),
    wgmma("columns_of_the_second_word_unmasked", "mask_scores(scores, column / 2, seen);", "mask_scores(scores, 0, seen);",
          "Corners.Accurate/cuda_fwd_wgmma_long_*"),
    wgmma("parts_overlap", "const int begin = min(split * of_split, work.num_tiles);", "const int begin = min(split, work.num_tiles);",
          "CasesOfFewRows.*"),
    wgmma("parts_in_one_place", "work.split * parts.part_stride", "0 * parts.part_stride", "CasesOfFewRows.*"),
    wgmma("sections_of_a_sequence_of_usual_width", "const uint32_t width = min(most, heads_q - first_head);",
          "const uint32_t width = most;", "CasesOfRaggedBatches.SectionsOfHeads*"),
    wgmma("counter_left_as_it_is", "atomicInc(counter, tiles - 1)", "atomicAdd(counter, 1)",
          "CasesOfRaggedBatches.WorkspaceWithGarbage*"),
    wgmma("wide_outputs_of_the_other_row", "make_float2(o[4 * block + 2 * r], ", "make_float2(o[4 * block], ",
          "Draws.Accurate/cuda_fwd_wgmma_*"),
    wgmma("values_of_as_many_panels_as_keys", "load_keys(shared.v, maps.v, PanelsV{}, i)", "load_keys(shared.v, maps.v, Panels{}, i)",
          "Draws.Accurate/cuda_fwd_wgmma_bf16_d192_v128*"),
    wgmma("last_tile_of_a_consumer_lost", "(any_end + kTileN - 1) / kTileN", "any_end / kTileN",
          "CasesOfMasks.B55*"),
    wgmma("consumers_end_at_their_first_row", "cut(seen_end + last_row)", "cut(seen_end + first_row)",
          "CasesOfMasks.B55*"),
    wgmma("consumers_begin_at_their_last_row", "cut(seen_begin + first_row)", "cut(seen_begin + last_row)",
          "Corners.Accurate/cuda_fwd_wgmma_*"),
    wgmma("own_tiles_in_the_other_order", "end = num_tiles - begin;", "end = num_tiles;",
          "CasesOfModifiers.B137*:Corners.Accurate/cuda_fwd_wgmma_*"),
    wgmma("rows_of_the_first_consumer", "work.sequence.first_q + work.tile_row + consumer * kWarpgroupRows",
          "work.sequence.first_q + work.tile_row", "CasesOfMasks.B55*"),
    wgmma("heads_of_the_last_section_of_usual_width",
          "section < order.sections ? order.section_heads : heads - first_head", "order.section_heads",
          "CasesOfLimits.MoreKeysThanL2*"),
    wgmma("sink_in_all_lanes", "sink != negative_infinity() && lane_in_quad == 0", "sink != negative_infinity()",
          "CasesOfModifiers.B141*"),
    wgmma("half_of_the_exponent_of_tanh", "2 * kLog2E * p.scale / cap", "kLog2E * p.scale / cap", "CasesOfModifiers.B132*"),
    wgmma("slopes_from_another_row", "8 * (i / 4) + i % 2 - kRowStep * (i / 2 % 2)", "8 * (i / 4) + i % 2",
          "CasesOfModifiers.B137*"),
    wgmma("one_formula_for_all_rows", "near[row] ? fmaf(x, scale_log2, state.offset[row]) : (x - used[row]) * scale_log2",
          "fmaf(x, scale_log2, state.offset[row])",
          "CasesOfExtremeScores.B15*"),
]
