"""Attention on torch tensors on a GPU: pointers, strides and torch's current stream.

PYTHONPATH=bindings/python python examples/python/torch_cuda.py

Exits with 77, which test runners take as skipped, where there is no torch or no GPU.
"""

import sys

from cuflash import check, explain, raw

DTYPES = {"torch.float32": raw.CUFLASH_F32, "torch.float16": raw.CUFLASH_F16,
          "torch.bfloat16": raw.CUFLASH_BF16}


def tensor(t) -> raw.cuflash_tensor_t:
    """A [batch, heads, length, head_dim] view, whatever its memory order: no copy is needed."""
    batch_stride, head_stride, row_stride, channel_stride = t.stride()
    if channel_stride != 1:
        raise ValueError("the channels must be contiguous")
    return raw.cuflash_tensor_t.new(data=t.data_ptr(), dtype=DTYPES[str(t.dtype)],
                                    batch_stride=batch_stride, head_stride=head_stride,
                                    row_stride=row_stride)


def attention_problem(q, k, v, o, causal: bool) -> raw.cuflash_problem_t:
    batch, heads_q, len_q, head_dim = q.shape
    return raw.cuflash_problem_t.new(
        batch=batch, heads_q=heads_q, heads_kv=k.shape[1], len_q=len_q, len_k=k.shape[2],
        head_dim=head_dim, q=tensor(q), k=tensor(k), v=tensor(v), o=tensor(o),
        mask=raw.CUFLASH_MASK_CAUSAL if causal else raw.CUFLASH_MASK_NONE)


def main() -> int:
    try:
        import torch
    except ImportError:
        print("skipped: torch is not installed")
        return 77
    if not torch.cuda.is_available():
        print("skipped: torch sees no GPU")
        return 77

    # [batch, length, heads, head_dim] in memory, as a projection leaves it; transposed as a view.
    torch.manual_seed(0)
    shape = (2, 1000, 16, 64)
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.float16).transpose(1, 2)
               for _ in range(3))
    o = torch.empty(shape, device="cuda", dtype=torch.float16).transpose(1, 2)
    problem = attention_problem(q, k, v, o, causal=True)
    check(raw.cuflash_attention_forward(None, problem, torch.cuda.current_stream().cuda_stream))

    expected = torch.nn.functional.scaled_dot_product_attention(
        q.float(), k.float(), v.float(), is_causal=True)
    error = (o.float() - expected).abs().max().item()
    print(f"{torch.cuda.get_device_name()}, kernel {explain('forward', None, problem)['kernel']}: "
          f"largest difference from torch in fp32 {error:.1e}")
    return 0 if error < 5e-3 else 1


if __name__ == "__main__":
    sys.exit(main())
