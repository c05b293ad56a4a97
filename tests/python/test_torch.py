"""The PyTorch operators: against torch's own attention, autograd, torch.compile, CUDA graphs.

Skipped where PyTorch is not installed; each test runs on CPU tensors, and on CUDA tensors where torch sees
a GPU and the library has CUDA.
"""
from __future__ import annotations

import threading
import time
import warnings

import cuflash
import numpy as np
import pytest
from arrays import bottom_right, forward
from cuflash import raw

torch = pytest.importorskip("torch", reason="PyTorch is not installed")

from cuflash import torch as cuflash_torch  # noqa: E402

OPERATORS = torch.ops.cuflash
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}
HAS_GPU_KERNELS = any(kernel.built and not kernel.on_cpu for kernel in cuflash.kernels())


def gpu() -> None:
    if not torch.cuda.is_available():
        pytest.skip("torch sees no GPU")
    if not HAS_GPU_KERNELS:
        pytest.skip("the library is built without CUDA")


@pytest.fixture(params=["cpu", "cuda"])
def device(request):
    if request.param == "cuda":
        gpu()
    return request.param


def tensors(device, dtype=torch.float32, shape_q=(2, 4, 17, 32), shape_k=(2, 2, 33, 32), grad=False):
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)
            for shape in (shape_q, shape_k, shape_k)]


def near(got, wanted, dtype=torch.float32) -> None:
    torch.testing.assert_close(got.double(), wanted.double(), rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def exact(q, k, v, causal=False, scale=None):
    """torch's own, in fp64, by the bottom-right rule and with grouped heads."""
    mask = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device)
    if causal:
        mask = mask.tril(k.shape[2] - q.shape[2])
    k, v = (x.double().repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    return torch.nn.functional.scaled_dot_product_attention(q.double(), k, v, mask, scale=scale)


# ---- values ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("causal", [False, True])
def test_forward_and_backward(device, dtype, causal):
    given = tensors(device, dtype, grad=True)
    wanted_o = exact(*given, causal=causal, scale=0.3)
    d_o = torch.randn(wanted_o.shape, generator=torch.Generator().manual_seed(6)).to(device, dtype)
    wanted = torch.autograd.grad(wanted_o, given, d_o.double())
    o = cuflash_torch.attention(*given, causal=causal, scale=0.3)
    near(o, wanted_o, dtype)
    for got, reference in zip(torch.autograd.grad(o, given, d_o), wanted):
        scale = max(1.0, reference.abs().max().item())
        near(got / scale, reference / scale, dtype)


def test_options(device):
    q, k, v = tensors(device)
    arrays = [x.cpu().numpy() for x in (q, k, v)]
    for options in ({"window": (4, 2)}, {"window": (None, 3), "align": "top-left"}, {"causal": True, "align": -3},
                    {"causal": True, "align": "top-left", "scale": 0.0}):
        o, lse = cuflash_torch.attention(q, k, v, return_lse=True, **options)
        wanted, wanted_lse = cuflash.attention(*arrays, return_lse=True, **options)
        near(o.cpu(), torch.from_numpy(wanted))
        np.testing.assert_allclose(lse.cpu().numpy(), wanted_lse, rtol=1e-5, atol=1e-5)


def test_layouts_and_memory(device):
    """[B, S, H, D] in, [B, S, H, D] out, dense; and the result follows q's order of memory."""
    q, k, v = (x.transpose(1, 2).contiguous() for x in tensors(device))
    o = cuflash_torch.attention(q, k, v, layout="bshd")
    assert o.shape == q.shape and o.is_contiguous()
    views = [x.transpose(1, 2) for x in (q, k, v)]
    again = cuflash_torch.attention(*views)
    assert again.stride() == views[0].stride()
    assert torch.equal(again.transpose(1, 2), o)
    packed = torch.randn(2, 17, 3, 4, 16, device=device)
    slices = [packed[:, :, i].transpose(1, 2) for i in range(3)]
    o = cuflash_torch.attention(*slices)
    near(o, exact(*slices))
    assert o.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("shape", [(2, 4, 5, 1), (1, 1, 1, 1), (2, 4, 0, 8), (0, 4, 5, 8)])
def test_small_extents(device, shape):
    q, k, v = tensors(device, shape_q=shape, shape_k=shape, grad=True)
    o = cuflash_torch.attention(q, k, v)
    assert o.shape == shape
    near(o, exact(q, k, v))
    o.sum().backward()
    assert all(x.grad.shape == shape for x in (q, k, v))


def test_overlapping_and_repeated_inputs(device):
    """Windows over one signal, where two strides are 1, and one head for all."""
    signal = torch.randn(24, device=device)
    q = signal.as_strided((2, 3, 17, 8), (0, 0, 1, 1))
    near(cuflash_torch.attention(q, q, q), exact(*[q.contiguous()] * 3))
    q, k, v = tensors(device)
    k, v = (x[:, :1].expand(2, 4, 33, 32) for x in (k, v))
    near(cuflash_torch.attention(q, k, v), exact(q, k, v))


def test_decode(device):
    q, k, v = tensors(device, shape_q=(2, 4, 2, 32), shape_k=(3, 2, 40, 32))
    lengths = torch.tensor([40, 7], dtype=torch.int32, device=device)
    o, lse = cuflash_torch.decode(q, k, v, lengths=lengths, causal=True, return_lse=True)
    lengths_later = torch.tensor([3, 9], dtype=torch.int32, device=device)
    later = cuflash_torch.decode(q, k, v, lengths=lengths_later, causal=True, num_splits=2)
    for result, given in ((o, lengths), (later, lengths_later)):
        for b, length in enumerate(given.tolist()):
            arrays = [x[b:b + 1].cpu().numpy() for x in (q, k[:, :, :length], v[:, :, :length])]
            near(result[b:b + 1].cpu(), torch.from_numpy(forward(*arrays, 32**-0.5, bottom_right(2, length))[0]))
    assert lse.shape == (2, 4, 2)
    swapped = cuflash_torch.decode(*(x.transpose(1, 2) for x in (q, k, v)), lengths=lengths, causal=True,
                                   layout="bshd")
    near(swapped.transpose(1, 2), o)
    near(cuflash_torch.decode(q[:1, :, :1], k, v), exact(q[:1, :, :1], k[:1], v[:1]))


# ---- all options --------------------------------------------------------------------------------------------


def exact_general(q, k, v, causal=False, softcap=0.0, alibi_slopes=None, bias=None, sinks=None):
    """In fp64 by torch's own operations."""
    q, k, v = (x.double() for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1]**-0.5
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    if bias is not None:
        scores = scores + bias.double()
    distance = (torch.arange(q.shape[-2])[:, None] + k.shape[-2] - q.shape[-2] - torch.arange(k.shape[-2])).to(q.device)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[..., None, None] * distance.abs()
    if causal:
        scores = scores.masked_fill(distance < 0, -torch.inf)
    if sinks is not None:
        scores = torch.cat([scores, sinks.double()[:, None, None].expand(*scores.shape[:-1], 1)], -1)
        return scores.softmax(-1)[..., :-1] @ v
    return scores.softmax(-1) @ v


def normal(device, *shape, dtype=torch.float32, grad=False, seed=9):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype).requires_grad_(grad)


def same_gradients(got, wanted, inputs):
    d_o = normal(got.device, *got.shape, dtype=got.dtype, seed=10)
    for a, b in zip(torch.autograd.grad(got, inputs, d_o), torch.autograd.grad(wanted, inputs, d_o.double())):
        scale = max(1.0, b.abs().max().item())
        near(a / scale, b / scale, got.dtype)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_scores(device, dtype, layout):
    given = tensors(device, dtype, grad=True)
    flip = (lambda x: x) if layout == "bhsd" else (lambda x: x.transpose(1, 2))
    for shape in ((2, 4, 17, 33), (4, 1, 33), (33,)):
        options = {"causal": True, "softcap": 2.0, "alibi_slopes": normal(device, 2, 4).abs(),
                   "bias": normal(device, *shape, dtype=dtype, grad=True), "sinks": normal(device, 4, grad=True)}
        o = flip(cuflash_torch.attention(*map(flip, given), layout=layout, **options))
        wanted = exact_general(*given, **options)
        near(o, wanted, dtype)
        same_gradients(o, wanted, [*given, options["bias"], options["sinks"]])


def test_bias_that_repeats(device):
    """An expanded tensor, as torch's users make masks; its gradient is that of what it was expanded from."""
    given = tensors(device, grad=True)
    bias = normal(device, 2, 1, 1, 33, grad=True)
    expanded = bias.expand(2, 4, 17, 33)
    same_gradients(cuflash_torch.attention(*given, bias=expanded), exact_general(*given, bias=expanded), [*given, bias])


@pytest.mark.parametrize("channels", [8, 48])
def test_channels_of_values(device, channels):
    q, k, _ = tensors(device, grad=True)
    v = normal(device, 2, 2, 33, channels, grad=True)
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
    for query in (q, swapped):
        o = cuflash_torch.attention(query, k, v)
        near(o, exact(q, k, v))
        assert (o if query is q else o.transpose(1, 2)).is_contiguous()
    same_gradients(o, exact(q, k, v), [q, k, v])
    near(cuflash_torch.decode(q.detach(), k.detach(), v.detach()), exact(q, k, v))


def test_varlen(device):
    """Empty sequences, and rows of none: those get 0."""
    lens_q, lens_k = (3, 0, 6, 4), (5, 4, 0, 9)
    q, k, v = (normal(device, 20, heads, dim, grad=True) for heads, dim in ((4, 16), (2, 16), (2, 24)))
    cu_q, cu_k = (torch.tensor([1, *(1 + np.cumsum(x))], dtype=torch.int32, device=device) for x in (lens_q, lens_k))
    bias, sinks = normal(device, 4, 4, 6, 9, grad=True), normal(device, 4, grad=True)
    lengths = {"max_len_q": 6, "max_len_k": 9}
    for options in ({}, {"causal": True, "softcap": 3.0, "bias": bias, "sinks": sinks}):
        o, lse = cuflash_torch.attention_varlen(q, k, v, cu_q, cu_k, **lengths, return_lse=True, **options)
        assert lse.shape == (4, 20) and not lse.requires_grad
        wanted = torch.zeros(20, 4, 24, dtype=torch.float64, device=device)
        for b, (len_q, len_k) in enumerate(zip(lens_q, lens_k)):
            rows, keys = slice(cu_q[b], cu_q[b + 1]), slice(cu_k[b], cu_k[b + 1])
            if len_q and len_k:
                own = {**options, "bias": bias[b, :, :len_q, :len_k]} if options else {}
                wanted[rows] = exact_general(*(x.transpose(0, 1) for x in (q[rows], k[keys], v[keys])),
                                             **own).transpose(0, 1)
        near(o, wanted)
        same_gradients(o, wanted, [q, k, v, *([bias, sinks] if options else [])])


def test_rows_in_use(device):
    given = [x.detach() for x in tensors(device, shape_q=(2, 4, 9, 16), shape_k=(2, 2, 12, 16))]
    used_q, used_k, pad = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([9, 4], [12, 8], [0, 3]))
    for x, first, last in zip(given, (0, 3, 3), (4, 8, 8)):
        x[1, :, :first] = x[1, :, last:] = torch.nan
        x.requires_grad_()
    o = cuflash_torch.attention(*given, seqused_q=used_q, seqused_k=used_k, leftpad_k=pad, causal=True)
    q, k, v = given
    wanted = torch.zeros_like(q, dtype=torch.float64)
    wanted[0] = exact_general(q[0], k[0], v[0], causal=True)
    wanted[1, :, :4] = exact_general(q[1, :, :4], k[1, :, 3:8], v[1, :, 3:8], causal=True)
    near(o, wanted)
    same_gradients(o, wanted, given)


@pytest.mark.parametrize("batch, len_q, len_k", [(0, 7, 13), (2, 0, 13), (2, 7, 0)])
def test_nothing_with_options(device, batch, len_q, len_k):
    q, k, v, bias, sinks = inputs = [normal(device, *shape, grad=True) for shape in (
        (batch, 4, len_q, 8), (batch, 4, len_k, 8), (batch, 4, len_k, 16), (batch, 1, len_q, len_k), (4,))]
    lengths = torch.full((batch,), len_k, dtype=torch.int32, device=device)
    o = cuflash_torch.attention(q, k, v, bias=bias, sinks=sinks, dropout_p=0.3, seqused_k=lengths)
    assert o.shape == (batch, 4, len_q, 16) and not o.any()
    for x, gradient in zip(inputs, torch.autograd.grad(o.sum(), inputs)):
        assert gradient.shape == x.shape and not gradient.any()


def test_dropout(device):
    q, k, v = tensors(device)
    arrays = [x.cpu().numpy() for x in (q, k, v)]
    o = cuflash_torch.attention(q, k, v, dropout_p=0.4, dropout_seed=17)
    near(o.cpu(), torch.from_numpy(cuflash.attention(*arrays, dropout_p=0.4, dropout_seed=17)))
    seed = torch.tensor([17], device=device)
    assert torch.equal(o, cuflash_torch.attention(q, k, v, dropout_p=0.4, dropout_seed=seed))
    runs = []
    for _ in range(2):
        torch.manual_seed(3)
        runs += [cuflash_torch.attention(q, k, v, dropout_p=0.4) for _ in range(2)]
    assert torch.equal(runs[0], runs[2]) and torch.equal(runs[1], runs[3]) and not torch.equal(runs[0], runs[1])
    near(cuflash_torch.attention(q, k, v, dropout_p=0.0, dropout_seed=17), exact(q, k, v))

    inputs = [x.requires_grad_() for x in (q, k, v)]
    got = torch.autograd.grad(cuflash_torch.attention(*inputs, dropout_p=0.4, dropout_seed=17).sum(), inputs)
    o, lse = cuflash.attention(*arrays, dropout_p=0.4, dropout_seed=17, return_lse=True)
    for a, b in zip(got, cuflash.attention_backward(np.ones_like(o), *arrays, o, lse, dropout_p=0.4, dropout_seed=17)):
        near(a.cpu(), torch.from_numpy(b))


# ---- autograd ---------------------------------------------------------------------------------------------


def test_gradcheck(device):
    """In fp32, where finite differences need large steps."""
    given = tensors(device, shape_q=(1, 2, 3, 4), shape_k=(1, 1, 5, 4), grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the inputs are not fp64
        for function in (lambda *x: cuflash_torch.attention(*x, causal=True),
                         lambda *x: OPERATORS.attention_forward(*x, True)[0]):
            assert torch.autograd.gradcheck(function, given, eps=1e-2, atol=2e-3, rtol=1e-2,
                                            nondet_tol=1e-5)

        def general(q, k, v, bias, sinks):
            return cuflash_torch.attention(q, k, v, softcap=2.0, bias=bias, sinks=sinks, dropout_p=0.3, dropout_seed=4)

        assert torch.autograd.gradcheck(
            general, (*given, normal(device, 2, 1, 5, grad=True), normal(device, 2, grad=True)), eps=1e-2, atol=2e-3,
            rtol=1e-2, nondet_tol=1e-5)


def test_opcheck(device):
    q, k, v = tensors(device, grad=True)
    o, lse = (x.detach() for x in OPERATORS.attention_forward(q, k, v))
    plain = [x.detach() for x in (q, k, v)]
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
    lengths = torch.tensor([3, 33], dtype=torch.int32, device=device)
    for operator, arguments in (
            (OPERATORS.attention_forward, (q, k, v)),
            (OPERATORS.attention_forward, (q, k, v, True, 0.5, 3, None, "top-left")),
            (OPERATORS.attention_forward, (swapped, k, v, True, None, None, None, "bottom-right", 2)),
            (OPERATORS.attention_backward, (o, *plain, o, lse, True)),
            (OPERATORS.decode, (plain[0][:, :, :1], *plain[1:], lengths)),
            (OPERATORS.decode, (plain[0][:, :, :1], *plain[1:])),
            (OPERATORS.attention_forward, (q, k, normal(device, 2, 2, 33, 24, grad=True)))):
        torch.library.opcheck(operator.default, arguments, atol=1e-5, rtol=1e-5)


def test_opcheck_general(device):
    q, k, v = tensors(device, grad=True)
    bias, sinks = normal(device, 4, 1, 33, grad=True), normal(device, 4, dtype=torch.float16, grad=True)
    scores = {"bias": bias, "sinks": sinks, "alibi_slopes": normal(device, 4), "softcap": 3.0, "causal": True}
    plain = [x.detach() for x in (q, k, v)]
    o, lse = OPERATORS.general_attention_forward(*plain, bias=bias.detach())
    rows, keys = (normal(device, 10, heads, 16, grad=True) for heads in (4, 2))
    cu = torch.tensor([0, 3, 10], dtype=torch.int32, device=device)
    for operator, arguments, options in (
            (OPERATORS.general_attention_forward, (q, k, v), scores),
            (OPERATORS.general_attention_forward, (rows, keys, keys), {
                "cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_len_q": 7, "max_len_k": 7}),
            (OPERATORS.general_attention_forward, (q, k, v), {
                "dropout_p": 0.5, "dropout_seed": torch.tensor([3], device=device)}),
            (OPERATORS.general_attention_backward, (o, *plain, o, lse, True, False), {"bias": bias.detach()})):
        torch.library.opcheck(operator.default, arguments, options, atol=1e-5, rtol=1e-5)


def test_some_inputs_without_gradients(device):
    q, k, v = tensors(device)
    for chosen in (q, k, v):
        for x in (q, k, v):
            x.requires_grad_(x is chosen)
        wanted, = torch.autograd.grad(exact(q, k, v).sum(), chosen)
        near(torch.autograd.grad(cuflash_torch.attention(q, k, v).sum(), chosen)[0], wanted)


def test_what_has_no_gradient(device):
    q, k, v = tensors(device, grad=True)
    o, lse = cuflash_torch.attention(q, k, v, return_lse=True)
    assert o.requires_grad and not lse.requires_grad
    first, = torch.autograd.grad(o.sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="attention_backward has no gradient"):
        first.sum().backward()
    with pytest.raises(NotImplementedError, match="decode has no gradient"):
        cuflash_torch.decode(q, k, v).sum().backward()
    with pytest.raises(NotImplementedError, match="alibi_slopes"):
        cuflash_torch.attention(q, k, v, alibi_slopes=normal(device, 4, grad=True)).sum().backward()
    first, = torch.autograd.grad(cuflash_torch.attention(q, k, v, softcap=1.0).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="general_attention_backward has no gradient"):
        first.sum().backward()
    with torch.inference_mode():
        near(cuflash_torch.attention(q, k, v), o)
    assert not cuflash_torch.attention(*(x.detach() for x in (q, k, v))).requires_grad


class _Named(torch.Tensor):
    """A class of tensors that sees the calls with it."""

    calls: list[str] = []

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        cls.calls.append(str(function))
        return super().__torch_function__(function, types, args, kwargs or {})


def test_whoever_listens_sees_the_call(device):
    """Calls of plain tensors go around the dispatcher, but only where nobody would notice."""
    from torch.overrides import TorchFunctionMode
    from torch.utils._python_dispatch import TorchDispatchMode
    seen = []

    class OfFunctions(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    class OfOperators(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            seen.append(str(function))
            return function(*args, **(kwargs or {}))

    q, k, v = tensors(device)
    calls = {"attention_forward": lambda q: cuflash_torch.attention(q, k, v),
             "decode": lambda q: cuflash_torch.decode(q, k, v)}
    for name, call in calls.items():
        with torch.no_grad():
            wanted = call(q)
            for mode in (OfFunctions, OfOperators):
                seen.clear()
                with mode():
                    assert torch.equal(call(q), wanted)
                assert any(f"cuflash.{name}" in function for function in seen), (mode, seen)
            with torch.profiler.profile() as profile:
                call(q)
            assert any(event.key == f"cuflash::{name}" for event in profile.key_averages())
            _Named.calls.clear()
            assert type(call(q.as_subclass(_Named))) is _Named
            assert any(f"cuflash.{name}" in function for function in _Named.calls)
            negated = torch.complex(q, -q).conj().imag  # it holds -q, and a bit that says so
            assert negated.is_neg()
            assert torch.equal(call(negated), wanted)
            with torch.device("meta"):
                nothing = [torch.empty(x.shape) for x in (q, k, v)]
            assert cuflash_torch.attention(*nothing).device.type == "meta"


def test_no_forward_mode(device):
    from torch.autograd import forward_ad
    q, k, v = tensors(device)
    with forward_ad.dual_level():
        cuflash_torch.attention(q, k, v)
        with pytest.raises(NotImplementedError, match="forward-mode"):
            cuflash_torch.attention(forward_ad.make_dual(q, q), k, v)


def test_threads(device):
    errors = []

    def train():
        try:
            given = tensors(device, grad=True)
            wanted = torch.autograd.grad(exact(*given, causal=True).sum(), given)
            for _ in range(20):
                got = torch.autograd.grad(cuflash_torch.attention(*given, causal=True).sum(), given)
            for a, b in zip(got, wanted):
                near(a, b)
        except BaseException as error:  # noqa: B036  (the main thread raises it)
            errors.append(error)

    threads = [threading.Thread(target=train) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors, errors


def test_deterministic(device):
    q, k, v = tensors(device, grad=True)
    torch.use_deterministic_algorithms(True)
    try:
        runs = [torch.autograd.grad(cuflash_torch.attention(q, k, v, causal=True).sum(), (q, k, v))
                for _ in range(3)]
    finally:
        torch.use_deterministic_algorithms(False)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0]))


# ---- compilers and graphs -----------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile(device, backend, dynamic):
    def loss(q, k, v):
        o, lse = cuflash_torch.attention(q * 2, k, v, causal=True, return_lse=True)
        swapped = cuflash_torch.attention(*(x.transpose(1, 2) for x in (q, k, v)), layout="bshd", window=(5, None))
        return (o.square().sum() + swapped.sum()), lse

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend=backend, dynamic=dynamic)
    for len_q in (17, 20):
        given = tensors(device, shape_q=(2, 4, len_q, 32), grad=True)
        wanted, wanted_lse = loss(*given)
        try:
            got, got_lse = compiled(*given)
        except Exception as error:
            # Inductor needs a C++ compiler for CPU tensors, Triton for CUDA.
            if backend == "inductor" and ("C++ compiler" in str(error) or "riton" in str(error)):
                pytest.skip(str(error).splitlines()[0])
            raise
        near(got / wanted, torch.ones_like(got))
        near(got_lse, wanted_lse)
        for a, b in zip(torch.autograd.grad(got, given), torch.autograd.grad(wanted, given)):
            near(a, b)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_general(device, dynamic):
    def loss(q, k, v, bias, sinks, cu):
        o = cuflash_torch.attention(q, k, v, causal=True, softcap=2.0, bias=bias, sinks=sinks, dropout_p=0.5,
                                    dropout_seed=3)
        rows, keys, values = (x.transpose(1, 2).flatten(0, 1) for x in (q, k, v))
        packed = cuflash_torch.attention_varlen(rows, keys, values, cu, cu, max_len_q=q.shape[2], max_len_k=k.shape[2])
        return o.square().sum() + packed.sum() + 0 * cuflash_torch.attention(q, k, v, dropout_p=0.1).sum()

    torch.compiler.reset()
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for len_q in (17, 20):
        inputs = [*tensors(device, shape_q=(2, 4, len_q, 32), grad=True), normal(device, 33, grad=True),
                  normal(device, 4, grad=True)]
        cu = torch.tensor([0, len_q, 2 * len_q], dtype=torch.int32, device=device)
        got, wanted = compiled(*inputs, cu), loss(*inputs, cu)
        near(got / wanted, torch.ones_like(got))
        for a, b in zip(torch.autograd.grad(got, inputs), torch.autograd.grad(wanted, inputs)):
            near(a, b)


def test_compile_decode(device):
    compiled = torch.compile(lambda *x: cuflash_torch.decode(*x[:3], lengths=x[3]) + 1, fullgraph=True,
                             backend="aot_eager")
    q, k, v = tensors(device, shape_q=(2, 4, 1, 32))
    lengths = torch.tensor([3, 33], dtype=torch.int32, device=device)
    near(compiled(q, k, v, lengths), cuflash_torch.decode(q, k, v, lengths=lengths) + 1)


def test_cuda_graph():
    """A training step and a decode step, captured once and replayed with other data."""
    gpu()
    q, k, v = tensors("cuda", torch.float16, grad=True)
    lengths = torch.tensor([3, 33], dtype=torch.int32, device="cuda")
    dropout_seed = torch.tensor([5], device="cuda")
    d_o = torch.ones_like(q)
    bias = normal("cuda", 4, 17, 33, grad=True)

    def step():
        o = cuflash_torch.attention(q, k, v, causal=True)
        general = cuflash_torch.attention(q, k, v, bias=bias, dropout_p=0.5, dropout_seed=dropout_seed,
                                          seqused_k=lengths)
        decoded = cuflash_torch.decode(q.detach()[:, :, :1], k.detach(), v.detach(), lengths=lengths)
        return (o, decoded, *torch.autograd.grad(o, (q, k, v), d_o), general,
                *torch.autograd.grad(general, (q, k, v, bias), d_o))

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for seed in range(3):
        with torch.no_grad():
            for x in (q, k, v):
                x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
            lengths.copy_(torch.tensor([seed + 1, 33 - seed], dtype=torch.int32))
            dropout_seed.fill_(seed)
        graph.replay()
        for got, wanted in zip(captured, step()):
            near(got, wanted, torch.float16)


def test_stream():
    gpu()
    q, k, v = tensors("cuda")
    wanted = exact(q, k, v)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # cycles: the kernels must wait for it
        later = q * 0.5
        o = cuflash_torch.attention(later * 2, k, v)
    stream.synchronize()
    near(o, wanted)


def test_second_gpu():
    gpu()
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    given = [x.to("cuda:1").requires_grad_() for x in tensors("cpu")]
    o = cuflash_torch.attention(*given)
    assert o.device.index == 1 and torch.cuda.current_device() == 0
    for a, b in zip(torch.autograd.grad(o.sum(), given), torch.autograd.grad(exact(*given).sum(), given)):
        near(a, b)


def test_imported_when_asked_for():
    assert cuflash.torch is cuflash_torch
    with pytest.raises(AttributeError, match="no attribute 'pytorch'"):
        cuflash.pytorch  # noqa: B018


# ---- errors -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("change, message", [
    (lambda q, k, v: (q[0], k, v), "q: 3 dimensions"),
    (lambda q, k, v: (q, k[:, :, :5], v), "v: shape"),
    (lambda q, k, v: (q, k.double(), v), "k: float64"),
    (lambda q, k, v: (q, k.half(), v), "k.dtype"),
    (lambda q, k, v: (q.transpose(2, 3), k, v), "q: .*contiguous"),
    (lambda q, k, v: (q[:, :3], k, v), "heads_q: 3"),
])
def test_bad_calls(device, change, message):
    q, k, v = tensors(device)
    with pytest.raises(ValueError, match=message):
        cuflash_torch.attention(*change(q, k, v))
    near(cuflash_torch.attention(q, k, v), exact(q, k, v))


def test_bad_options(device):
    q, k, v = tensors(device)
    for options in ({"layout": "sbhd"}, {"align": "middle"}, {"scale": -1.0}, {"window": (-2, 0)}, {"softcap": -1.0},
                    {"bias": torch.ones(17, 1, device=device)}, {"sinks": torch.ones(3, device=device)},
                    {"dropout_p": 2.0}, {"dropout_seed": 2**63, "dropout_p": 0.5},
                    {"seqused_k": torch.ones(2, device=device)}):
        with pytest.raises(cuflash.ArgumentError, match=next(iter(options))):
            cuflash_torch.attention(q, k, v, **options)


def test_bad_packed_calls(device):
    q, cu = normal(device, 10, 2, 8), torch.tensor([0, 10], dtype=torch.int32, device=device)
    for arguments, message in (((q[None], q, q, cu, cu), "q: 4 dimensions"),
                               ((q, q, q, cu.long(), cu), "cu_seqlens_q: int64"),
                               ((q, q, q, cu, cu[:1]), "cu_seqlens_k: shape"),
                               ((q, q[:, :, :4], q, cu, cu), "k: shape")):
        with pytest.raises(ValueError, match=message):
            cuflash_torch.attention_varlen(*arguments, max_len_q=10, max_len_k=10)
    with pytest.raises(TypeError, match="casual"):
        cuflash_torch.attention_varlen(q, q, q, cu, cu, max_len_q=10, max_len_k=10, casual=True)


def test_devices_differ():
    gpu()
    q, k, v = tensors("cpu")
    with pytest.raises(cuflash.ArgumentError, match="k: on the CPU, but q is on CUDA device 0"):
        cuflash_torch.attention(q.cuda(), k, v.cuda())


def test_many_kinds_of_calls(device):
    """More than a thread keeps structs for."""
    for length in range(1, cuflash_torch._Plans.LIMIT + 40):
        q = torch.ones(1, 1, length, 4, device=device)
        near(cuflash_torch.attention(q, q, q), q)
    assert len(cuflash_torch._plans._plans) <= cuflash_torch._Plans.LIMIT


def test_overhead(device, record_property):
    """What a call costs beyond the C call itself. The bound is loose: machines of tests are busy."""
    q, k, v = tensors(device, shape_q=(1, 1, 1, 8), shape_k=(1, 1, 1, 8))
    o, lse = OPERATORS.attention_forward(q, k, v)
    problem = raw.cuflash_problem_t.new(batch=1, heads_q=1, len_q=1, len_k=1, head_dim=8, lse=lse.data_ptr())
    for struct, tensor in ((problem.q, q), (problem.k, k), (problem.v, v), (problem.o, o)):
        struct.data, struct.dtype = tensor.data_ptr(), raw.CUFLASH_F32
    stream = torch.cuda.current_stream().cuda_stream if device == "cuda" else None

    def best(call):
        times = []
        for _ in range(50):
            start = time.perf_counter()
            for _ in range(20):
                call()
            times.append((time.perf_counter() - start) / 20)
            if device == "cuda":
                torch.cuda.synchronize()
        return min(times) * 1e6

    c_call = best(lambda: raw.cuflash_attention_forward(cuflash_torch.handle_of(q.get_device()), problem, stream))
    call = best(lambda: cuflash_torch.attention(q, k, v))
    q.requires_grad_()
    training = best(lambda: cuflash_torch.attention(q, k, v))
    text = f"{device}: C call {c_call:.1f} us, attention() {call:.1f} us, with gradients {training:.1f} us"
    record_property("overhead", text)
    print(text)
    assert call - c_call < 60


# ---- caches -----------------------------------------------------------------------------------------------

LENGTHS, PAGE, COLUMNS = [9, 14], 4, 4


def pages(device, dtype=torch.float32, dim_v=32, **further):
    """A cache of two sequences in pages of random order, and all of its keys and values in fp64, padded."""
    generator = torch.Generator().manual_seed(8)
    table = torch.randperm(9, generator=generator)[:8].view(2, COLUMNS)
    pools, whole = [], []
    for dim in (32, dim_v):
        pool = torch.randn((9, 2, PAGE, dim), generator=generator)
        pool = (40 * pool).clamp(-128, 127).to(dtype) if dtype == torch.int8 else pool.to(dtype)
        pools.append(pool.to(device))
        whole.append(pool.double()[table].transpose(1, 2).reshape(2, 2, PAGE * COLUMNS, dim).to(device))
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=device)
    cache = cuflash.PagedKVCache(*pools, table.to(torch.int32).to(device), lengths=lengths, **further)
    return cache, whole


def exact_decode(q, k, v, lengths, causal=False):
    return torch.cat([exact(q[b:b + 1], k[b:b + 1, :, :n], v[b:b + 1, :, :n], causal)
                      for b, n in enumerate(lengths)])


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_decode_over_pages(device, layout):
    cache, (k, v) = pages(device, dim_v=24)
    q = normal(device, 2, 4, 3, 32)
    given = q if layout == "bhsd" else q.transpose(1, 2).contiguous()
    for lengths in (LENGTHS, [3, 16]):  # the second by the structs of the first
        cache.lengths = torch.tensor(lengths, dtype=torch.int32, device=device)
        o, lse = cuflash_torch.decode(given, cache, causal=True, return_lse=True, layout=layout)
        o = o if layout == "bhsd" else o.transpose(1, 2)
        near(o, exact_decode(q, k, v, lengths, causal=True))
        again, lse_again = cuflash.decode(q, cache, causal=True, return_lse=True)
        assert torch.equal(o, again) and torch.equal(lse, lse_again)
    cache.v = None
    near(cuflash_torch.decode(q, cache), exact_decode(q, k, k, lengths))
    with pytest.raises(NotImplementedError, match="cache_decode has no gradient"):
        cuflash_torch.decode(q.clone().requires_grad_(), cache).sum().backward()


def test_decode_of_codes(device):
    scale = normal(device, 9, 2, 1, 1).abs() / 40
    cache, (k, v) = pages(device, torch.int8, k_scale=scale, v_scale=scale)
    of_slots = scale.double()[cache.block_table.long()].transpose(1, 2).expand(2, 2, COLUMNS, PAGE, 1)
    k, v = (x * of_slots.reshape(2, 2, -1, 1) for x in (k, v))
    q = normal(device, 2, 4, 1, 32)
    near(cuflash_torch.decode(q, cache), exact_decode(q, k, v, LENGTHS))
    rounded = [x.to(torch.float8_e4m3fn) for x in (k, v)]
    cache = cuflash.KVCache(*rounded, lengths=cache.lengths)
    wanted = exact_decode(q, *(x.double() for x in rounded), LENGTHS)
    near(cuflash_torch.decode(q, cache), wanted)
    cache.k, cache.k_dtype = cache.k.view(torch.uint8), "float8_e4m3fn"
    near(cuflash_torch.decode(q, cache), wanted)


def test_tree_mask(device):
    """A word for each row, in every operator that takes one."""
    q, k, v = tensors(device, shape_q=(2, 4, 3, 32))
    words = torch.tensor([0b001, 0b011, 0b101], dtype=torch.int32, device=device).view(1, 3, 1)
    seen = torch.ones(3, 33, dtype=torch.bool, device=device)
    seen[:, 30:] = torch.tensor([[1, 0, 0], [1, 1, 0], [1, 0, 1]], dtype=torch.bool)
    bias = torch.where(seen, 0.0, float("-inf"))
    wanted = cuflash_torch.attention(q, k, v, bias=bias)
    near(cuflash_torch.attention(q, k, v, tree_mask=words), wanted)
    near(cuflash_torch.decode(q, k, v, tree_mask=words), wanted)
    near(cuflash_torch.decode(q, cuflash.KVCache(k, v), tree_mask=words, tree_mask_len=3, sinks=torch.full(
        (4,), -float("inf"), device=device), batch_invariant=True, sm_margin=2), wanted)
    with pytest.raises(cuflash.UnsupportedError, match="tree_mask"):
        cuflash_torch.attention(q.requires_grad_(), k, v, tree_mask=words).sum().backward()


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
def test_append(device, layout):
    """As cache.append(), whose values other tests look at; q into new memory, into q_out and in place."""
    order = (lambda x: x) if layout == "bhsd" else (lambda x: x.transpose(1, 2).contiguous())
    k, v, q = (order(normal(device, 2, heads, 2, 32)) for heads in (2, 2, 4))
    turns = torch.arange(16.0, device=device)[:, None] * torch.rand(8, device=device)
    options = {"cos": turns.cos(), "sin": turns.sin(), "interleaved": True, "layout": layout}
    (wanted, _), (cache, _) = pages(device), pages(device)
    wanted_q = wanted.append(k, v, q=q, **options)
    q_new = cuflash_torch.append(cache, k, v, q=q, **options)
    assert torch.equal(q_new, wanted_q) and q_new.shape == q.shape and not torch.equal(q_new, q)
    for got, other in ((cache.k, wanted.k), (cache.v, wanted.v)):
        assert torch.equal(got, other)
    assert cuflash_torch.append(cache, k, v, **options) is None
    kept = q.clone()
    with pytest.raises(cuflash.Error, match="q_out: given without q"):
        cuflash_torch.append(cache, k, v, q_out=q, **options)
    assert torch.equal(q, kept)
    out = torch.empty_like(q)
    cuflash_torch.append(cache, k, q=q, q_out=out, **options)
    assert torch.equal(out, wanted_q)
    cuflash_torch.append(cache, k, v, q=q, q_out=q, **options)
    assert torch.equal(q, wanted_q)
    assert cache.lengths.tolist() == LENGTHS


def step(q, k, v, cache):
    q = cuflash_torch.append(cache, k, v, q=q)
    cache.lengths = cache.lengths + 1
    return cuflash_torch.decode(q, cache, scale=0.2)


def test_compiled_step(device):
    """A token appended and attended to, in one graph."""
    torch._dynamo.reset()
    (wanted, _), (cache, (k, v)) = pages(device), pages(device)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    for i in range(2):
        token = [normal(device, 2, heads, 1, 32) + i for heads in (4, 2, 2)]
        assert torch.equal(compiled(*token, cache), step(*token, wanted))
    assert torch.equal(cache.k, wanted.k) and cache.lengths.tolist() == [n + 2 for n in LENGTHS]


def test_compiled_options(device):
    """Arrays as a cache, in the other layout and with options, of lengths that change."""
    torch._dynamo.reset()

    def masked(q, k, v, words, lengths):
        return cuflash_torch.decode(q, k, v, lengths=lengths, tree_mask=words, softcap=3.0, layout="bshd")

    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, slots in ((2, 9), (3, 12), (4, 20)):
        q, k, v = (normal(device, batch, n, heads, 16) for n, heads in ((2, 4), (slots, 2), (slots, 2)))
        words = torch.tensor([[1], [3]], dtype=torch.int32, device=device)
        lengths = torch.full((batch,), slots - 2, dtype=torch.int32, device=device)
        near(compiled(q, k, v, words, lengths), masked(q, k, v, words, lengths))


def test_opcheck_of_caches(device):
    cache, _ = pages(device, dim_v=24)
    q, k, v = normal(device, 2, 4, 1, 32), normal(device, 2, 2, 1, 32), normal(device, 2, 2, 1, 24)
    given = {"block_table": cache.block_table, "lengths": cache.lengths}
    torch.library.opcheck(OPERATORS.cache_decode.default, (q, cache.k, cache.v), given)
    torch.library.opcheck(OPERATORS.cache_decode.default, (q, cache.k), {**given, "head_dim_v": 16, "softcap": 2.0})
    torch.library.opcheck(OPERATORS.cache_append.default, (k, v, q, torch.empty_like(q), cache.k, cache.v), given)
    torch.library.opcheck(OPERATORS.cache_append.default, (k, None, None, q, cache.k, None), given)


def test_graph_of_a_step():
    """A captured step that appends and attends, replayed with other lengths."""
    gpu()
    (wanted, _), (cache, _) = pages("cuda", torch.float16), pages("cuda", torch.float16)
    q, k, v = (normal("cuda", 2, heads, 1, 32, dtype=torch.float16) for heads in (4, 2, 2))

    def once(of):
        rotated = cuflash_torch.append(of, k, v, q=q)
        of.lengths += 1
        return cuflash_torch.decode(rotated, of)

    graph = torch.cuda.CUDAGraph()
    once(pages("cuda", torch.float16)[0])
    with torch.cuda.graph(graph):
        o = once(cache)
    for _ in range(2):
        graph.replay()
        assert torch.equal(o, once(wanted))
    assert cache.lengths.tolist() == wanted.lengths.tolist()


def test_bad_caches(device):
    cache, _ = pages(device)
    q, k = normal(device, 2, 4, 1, 32), normal(device, 2, 2, 1, 32)
    for call, message in (
            (lambda: cuflash_torch.decode(q, cache.k), "v_cache: None"),
            (lambda: cuflash_torch.decode(q, cache, cache.v), "v_cache: beside a PagedKVCache"),
            (lambda: cuflash_torch.decode(q[:1], cache), "block_table: shape"),
            (lambda: cuflash_torch.decode(q, cuflash.PagedKVCache(cache.k, cache.v)), "block_table, or indptr"),
            (lambda: cuflash_torch.decode(q, cache, tree_mask=k), "tree_mask: "),
            (lambda: cuflash_torch.append(cache, k[..., :16]), "k_cache: shape"),
            (lambda: cuflash_torch.append(cache, k, cos=torch.ones(9, 16, device=device)), "append.sin: is NULL"),
            (lambda: OPERATORS.cache_decode(q, cache.k, cache.v, block_table=cache.block_table,
                                            batch_idx=cache.lengths), "batch_idx: of a cache in pages"),
            (lambda: cuflash_torch.append(cache, k, layout="hnd"), "layout: 'hnd'")):
        with pytest.raises(cuflash.ArgumentError, match=message):
            call()
