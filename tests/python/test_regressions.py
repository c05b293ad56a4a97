"""Defects that a review of the CPU device found, each as a user would meet it again."""
from __future__ import annotations

import ctypes

import numpy as np
import pytest
from arrays import poisoned, problem, run_python, tensor
from cuflash import check, raw


# Of 300,000 terms. Sums in blocks come within 2.2e-5; one long sum was off by more than 1e-3.
DRIFT = 5e-5


def message() -> str:
    return raw.cuflash_last_error().decode()


def test_long_sums_do_not_drift(cpu):
    """One fp32 sum over 300,000 equal values is wrong in the third digit; forward and backward."""
    length = 300_000
    q = np.zeros((1, 1, 1, 1), np.float32)
    many = np.broadcast_to(q, (1, 1, length, 1))
    v = np.full((1, 1, 1, 1), 0.1, np.float32)
    ones = np.ones((1, 1, 1, 1), np.float32)
    o, lse = poisoned(q.shape), poisoned((1, 1, 1))
    check(raw.cuflash_attention_forward(
        cpu, problem(q, many, np.broadcast_to(v, many.shape), o, lse), None))
    assert o[0, 0, 0, 0] == pytest.approx(0.1, rel=DRIFT)
    assert lse[0, 0, 0] == pytest.approx(np.log(length), rel=DRIFT)

    o, lse = np.full((1, 1, length, 1), 0.1, np.float32), np.zeros((1, 1, length), np.float32)
    dq, dk, dv = poisoned(o.shape), poisoned(v.shape), poisoned(v.shape)
    gradients = raw.cuflash_gradients_t.new(d_o=tensor(np.broadcast_to(0.1 * ones, o.shape)),
                                            dq=tensor(dq), dk=tensor(dk), dv=tensor(dv))
    check(raw.cuflash_attention_backward(cpu, problem(many, q, v, o, lse), gradients, None))
    assert dv[0, 0, 0, 0] == pytest.approx(0.1 * length, rel=DRIFT)


def merge_of(parts, lse, o, **fields):
    return raw.cuflash_merge_t.new(
        batch=1, heads=1, len=1, head_dim=1, parts=tensor(parts[:1, None, None, None]),
        lse_parts=lse.ctypes.data, o=tensor(o), **fields)


def test_merge_of_many_parts_does_not_drift(cpu):
    count = 300_000
    parts, lse = np.full(count, 0.1, np.float32), np.zeros(count, np.float32)
    o = poisoned((1, 1, 1, 1))
    check(raw.cuflash_merge_states(cpu, merge_of(parts, lse, o, num_parts=count, part_stride=1,
                                                 lse_part_stride=1), None))
    assert o[0, 0, 0, 0] == pytest.approx(0.1, rel=DRIFT)


@pytest.mark.parametrize("field", ["part_stride", "lse_part_stride"])
def test_merge_refuses_parts_beyond_the_address_space(cpu, field):
    parts, lse, o = np.zeros(2, np.float32), np.zeros(2, np.float32), poisoned((1, 1, 1, 1))
    strides = {"part_stride": 1, "lse_part_stride": 1, field: 1 << 48}
    status = raw.cuflash_merge_states(cpu, merge_of(parts, lse, o, num_parts=2**31 - 1, **strides),
                                      None)
    assert status == raw.CUFLASH_ERROR_INVALID_VALUE
    assert f"merge.{field}" in message() and "2147483647" in message()
    assert np.isnan(o).all()


def test_gqa_refuses_no_key_heads(cpu_by_default):
    x = np.zeros(1024, np.float32)
    o = poisoned(1024)
    status = raw.cuflash_attention_forward_gqa_f32(
        *(x.ctypes.data_as(ctypes.c_void_p),) * 3, o.ctypes.data_as(ctypes.c_void_p), None,
        1, 4, 0, 2, 4, 4, 1.0, 0, None)
    assert status == raw.CUFLASH_ERROR_DIMENSION_MISMATCH
    assert "num_heads_kv: 0" in message() and np.isnan(o).all()


def test_gqa_messages_name_the_function_s_own_arguments(cpu_by_default):
    status = raw.cuflash_attention_decode_gqa_f32(
        None, None, None, None, None, None, 1, 1, 1, 1, -3, 4, 1.0, 0, 0, None)
    assert status == raw.CUFLASH_ERROR_INVALID_DIMENSION
    assert message().startswith("len_k: -3")


def test_preload_takes_a_decode_problem(cpu):
    given = raw.cuflash_problem_t.new(batch=1, heads_q=1, len_q=1, head_dim=64, num_splits=8)
    given.q.dtype = raw.CUFLASH_F16
    check(raw.cuflash_preload(cpu, given))


def test_queries_do_not_look_at_the_workspace(cpu):
    q = np.zeros((1, 1, 4, 8), np.float32)
    given = problem(q, q, q, poisoned(q.shape), workspace=8, workspace_size=100)
    size = ctypes.c_size_t()
    check(raw.cuflash_forward_workspace_size(cpu, given, ctypes.byref(size)))


def test_an_unknown_device_in_the_environment_is_refused():
    run = run_python("""
from cuflash import raw
given = raw.cuflash_problem_t.new(batch=1, heads_q=1, len_q=0, head_dim=8)
given.q.dtype = raw.CUFLASH_F32
print(raw.cuflash_attention_forward(None, given, None), raw.cuflash_last_error().decode())
""", CUFLASH_DEVICE="gpu7")
    assert run.stdout.startswith("8 CUFLASH_DEVICE"), run.stdout + run.stderr


def test_a_child_of_fork_can_log(tmp_path):
    """The parent's other thread logs all the time; a lock it held would be held in the child for ever."""
    run = run_python("""
import os, signal, threading, numpy as np, cuflash
from cuflash import raw
given = raw.cuflash_problem_t.new(batch=-1)
def refuse():
    raw.cuflash_attention_forward(None, given, None)
stop = False
def loop():
    while not stop:
        refuse()
thread = threading.Thread(target=loop)
thread.start()
for _ in range(30):
    child = os.fork()
    if child == 0:
        signal.alarm(5)
        refuse()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
stop = True
thread.join()
""", CUFLASH_LOG_LEVEL="1", CUFLASH_LOG_FILE=str(tmp_path / "log"))
    assert run.returncode == 0, run.stderr
