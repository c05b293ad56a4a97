"""A PyTorch module whose attention is cuflash: trained, compiled, replayed from a CUDA graph, and token by token over a
cache in pages.

python examples/python/torch_training.py    with the package installed, or PYTHONPATH=bindings/python

Exits with 77, which test runners take as skipped, where there is no torch.
"""

import sys

try:
    import torch
except ImportError:
    print("skipped: torch is not installed")
    sys.exit(77)

import cuflash
from cuflash import torch as cuflash_torch


class SelfAttention(torch.nn.Module):
    def __init__(self, width: int, heads: int):
        super().__init__()
        self.heads = heads
        self.project = torch.nn.Linear(width, 3 * width)

    def forward(self, x):
        q, k, v = self.project(x).unflatten(-1, (3, self.heads, -1)).unbind(2)  # views [B, S, H, D]
        return cuflash_torch.attention(q, k, v, causal=True, layout="bshd").flatten(2)


def reference(module: SelfAttention, x):
    q, k, v = module.project(x).unflatten(-1, (3, module.heads, -1)).permute(2, 0, 3, 1, 4)
    o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
    return o.transpose(1, 2).flatten(2)


def replayed(module: SelfAttention, x):
    """On a GPU: captured once, then replayed without Python."""
    with torch.no_grad():
        module(x)  # kernels are loaded before the capture
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            o = module(x)
    graph.replay()
    return o


def next_token(module: SelfAttention, x, cache):
    """x [B, 1, width], the newest token: into the cache, then over all that is there."""
    q, k, v = module.project(x).unflatten(-1, (3, module.heads, -1)).unbind(2)
    cuflash_torch.append(cache, k, v, layout="bshd")
    cache.lengths = cache.lengths + 1
    return cuflash_torch.decode(q, cache, layout="bshd").flatten(2)


def token_by_token(module: SelfAttention, x, page_size=16):
    batch, length, width = x.shape
    columns = -(-length // page_size)
    pool = x.new_zeros(2, batch * columns, page_size, module.heads, width // module.heads)
    table = torch.randperm(batch * columns, dtype=torch.int32, device=x.device).view(batch, columns)
    lengths = torch.zeros(batch, dtype=torch.int32, device=x.device)
    cache = cuflash.PagedKVCache(*pool, table, lengths=lengths, layout="bshd")
    with torch.no_grad():
        return torch.cat([next_token(module, x[:, i:i + 1], cache) for i in range(length)], dim=1)


def main() -> int:
    has_cuda = any(kernel.built and not kernel.on_cpu for kernel in cuflash.kernels())
    device = "cuda" if torch.cuda.is_available() and has_cuda else "cpu"
    torch.manual_seed(0)
    module = SelfAttention(256, heads=4).to(device)
    x = torch.randn(2, 100, 256, device=device)

    module(x).square().sum().backward()
    got = module.project.weight.grad.clone()
    module.zero_grad()
    reference(module, x).square().sum().backward()
    wanted = module.project.weight.grad
    error = ((got - wanted).abs().max() / wanted.abs().max()).item()

    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    outputs = [compiled(x), token_by_token(module, x)]
    if device == "cuda":
        outputs.append(replayed(module, x))
    error = max([error, *((o - module(x)).abs().max().item() for o in outputs)])
    print(f"{device}: largest difference from torch and between the ways {error:.1e}")
    return 0 if error < 1e-4 else 1


if __name__ == "__main__":
    sys.exit(main())
