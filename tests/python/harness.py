"""Cases, what is counted, and comparisons."""

import itertools
import json
import os
import subprocess
import sys
import traceback
import zlib

import torch
import torch_npu

ON_950 = os.environ.get("ASCEND_EMU_SOC", "").startswith("Ascend950")
CASES = []
# Calls of operators whose results were compared with a reference.
calls = {}
# How the arguments of the first Python function are called by the second.
V2_NAMES = {
    "num_heads": "num_query_heads",
    "scale": "softmax_scale",
    "actual_seq_lengths": "actual_seq_qlen",
    "actual_seq_lengths_kv": "actual_seq_kvlen",
    "softmax_lse_flag": "return_softmax_lse",
    "key_antiquant_scale": "dequant_scale_key",
    "key_antiquant_offset": "dequant_offset_key",
    "value_antiquant_scale": "dequant_scale_value",
    "value_antiquant_offset": "dequant_offset_value",
    "key_antiquant_mode": "key_quant_mode",
    "value_antiquant_mode": "value_quant_mode",
    "quant_scale2": "quant_scale_out",
    "quant_offset2": "quant_offset_out",
}


def case(**axes):
    """Registers a function for every combination of the values of its arguments."""

    def register(function):
        names = list(axes)
        for values in itertools.product(*axes.values()):
            CASES.append((function, dict(zip(names, values))))
        return function

    return register


def counted(operator):
    calls[operator] = calls.get(operator, 0) + 1


class Trace:
    """The file that ASCEND_EMU_TRACE names, which gets a line for each call of the C ABI."""

    read = 0

    @classmethod
    def new(cls):
        """The C functions that were called since the last time."""
        torch.npu.synchronize()
        with open(os.environ["ASCEND_EMU_TRACE"], encoding="utf-8") as trace:
            trace.seek(cls.read)
            functions = [json.loads(line)["function"] for line in trace.readlines()]
            cls.read = trace.tell()
        return functions


def reaching(function, operator, *arguments, **named):
    """One call of a function of `torch_npu`, which the trace must show to launch a C operator."""
    Trace.new()
    result = getattr(torch_npu, function)(*arguments, **named)
    launched = [name for name in Trace.new() if name.startswith("aclnn") and not name.endswith("WorkspaceSize")]
    assert operator in launched, f"{function} launched {launched}, not {operator}"
    counted(f"{function} by {operator}")
    return result


def fused(entry, query, key, value, **arguments):
    """One call of `npu_fused_infer_attention_score`, by the names of its first version. `entry` is 1 or 2."""
    if entry == 1:
        counted("npu_fused_infer_attention_score")
        return torch_npu.npu_fused_infer_attention_score(query, key, value, **arguments)
    counted("npu_fused_infer_attention_score_v2")
    arguments = {V2_NAMES.get(name, name): value for name, value in arguments.items()}
    return torch_npu.npu_fused_infer_attention_score_v2(query, key, value, **arguments)


# How far a result of a dtype may be from the exact one: absolutely, and of its size.
TOLERANCE = {
    torch.float16: (2e-3, 2e-3),
    torch.bfloat16: (1.6e-2, 1.6e-2),
    torch.float32: (2e-3, 2e-3),
}


def close(actual, expected, what="output", tolerance=None):
    """Compares a device's tensor with the reference; names the first element that differs."""
    assert tuple(actual.shape) == tuple(expected.shape), f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    absolute, relative = tolerance or TOLERANCE[actual.dtype]
    actual, expected = actual.detach().cpu().double(), expected.double()
    same = torch.isclose(actual, expected, rtol=relative, atol=absolute)
    if not same.all():
        at = tuple(torch.nonzero(~same)[0].tolist())
        worst = (actual - expected).abs().max().item()
        raise AssertionError(
            f"{what}: {(~same).sum().item()} of {same.numel()} elements; at {at} {actual[at].item()}, "
            f"not {expected[at].item()}; furthest {worst:.3g}"
        )


def exact(actual, expected, what="output"):
    assert actual.dtype == expected.dtype, f"{what}: {actual.dtype}, not {expected.dtype}"
    actual = actual.detach().cpu()
    assert tuple(actual.shape) == tuple(expected.shape), f"{what}: shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    different = (actual != expected).sum().item()
    assert not different, f"{what}: {different} of {expected.numel()} elements differ"


def refused(call, *texts):
    """The call must raise a RuntimeError that contains all of `texts`."""
    try:
        call()
        torch.npu.synchronize()
    except RuntimeError as error:
        for text in texts:
            assert text in str(error), f"refused without {text!r}: {error}"
        return str(error)
    raise AssertionError("the call was taken")


def strictly(program, **variables):
    """Runs a program of its own with the strict checks: an error there ends what PyTorch can do in a process."""
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"ASCEND_EMU_CHECK": "strict"} | variables,
        capture_output=True,
        text=True,
        timeout=300,
    )
    return ended.returncode, ended.stdout + ended.stderr


def run(modules, only=()):
    """Runs the registered cases of some modules; returns how many passed and the names of those that did not."""
    passed, failed = 0, []
    for function, arguments in CASES:
        if function.__module__ not in modules:
            continue
        shown = ", ".join(f"{name}={str(value).removeprefix('torch.')}" for name, value in arguments.items())
        name = f"{function.__module__}.{function.__name__}({shown})"
        if only and not any(text in name for text in only):
            continue
        torch.manual_seed(zlib.crc32(name.encode()))
        try:
            function(**arguments)
            passed += 1
            print(f"ok    {name}", flush=True)
        except Exception as error:
            failed.append(name)
            print(f"FAIL  {name}: {type(error).__name__}: {error}", flush=True)
            if not isinstance(error, AssertionError):
                traceback.print_exc(limit=-3, file=sys.stdout)
    return passed, failed
