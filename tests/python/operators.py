"""Every small operator of the emulation, called by what calls it in PyTorch, against PyTorch on the host.

ASCEND_EMU_TRACE must name a file, as it does in this module's group of run.py: by the trace each case sees whether its
operator was called.
"""

import pathlib
import re

import torch
import torch_npu

from harness import Trace, case

# What calls an operator: one line of Python, and, where the host has no such function, another that is the same there.
CALLS = {
    # Copies.
    "aclnnInplaceCopy": "x.t().contiguous()",
    "aclnnCast": ("torch_npu.npu_dtype_cast(x, torch.float16)", "x.to(torch.float16)"),
    "aclnnCat": "torch.cat([x, y], 1)",
    "aclnnStack": "torch.stack([x, y], 1)",
    "aclnnRepeat": "x.repeat(2, 3)",
    "aclnnFlip": "torch.flip(x, [0])",
    "aclnnConstantPadNd": "torch.nn.functional.pad(x, (1, -2), value=3.0)",
    # Numbers that no tensor is needed for. Those drawn at random are known by their shapes or bounds.
    "aclnnInplaceFillScalar": "torch.full((3,), 2.5, device=device)",
    "aclnnInplaceFillTensor": "x.fill_(number)",
    "aclnnInplaceZero": "torch.zeros(3, device=device)",
    "aclnnInplaceOne": "torch.ones(3, device=device)",
    "aclnnArange": "torch.arange(1, 9, 3, device=device)",
    "aclnnEye": "torch.eye(3, device=device)",
    "aclnnTriu": "torch.triu(x, 1)",
    "aclnnTril": "torch.tril(x, -1)",
    "aclnnInplaceTriu": "x.triu_()",
    "aclnnInplaceTril": "x.tril_()",
    "aclnnInplaceNormal": "torch.randn(5, device=device).shape",
    "aclnnInplaceUniform": "(torch.rand(5, device=device) < 1).all()",
    "aclnnInplaceRandom": "torch.randint(5, 6, (3,), device=device)",
    "aclnnDropoutGenMaskV2": (
        "torch_npu._npu_dropout_gen_mask(x, (4, 33), 0.0, 7, 9)",
        "torch.full((32,), 255, dtype=torch.uint8)",
    ),
    # By positions.
    "aclnnIndex": "x[chosen, chosen]",
    "aclnnIndexPutImpl": "x[chosen] = row",
    "aclnnIndexSelect": "torch.index_select(x, 1, chosen)",
    "aclnnInplaceIndexCopy": "x.index_copy_(0, chosen, y[:3])",
    "aclnnGather": "torch.gather(x, 1, places)",
    "aclnnEmbedding": "torch.nn.functional.embedding(chosen, x)",
    "aclnnScatter": "torch.scatter(x, 1, places, y)",
    "aclnnInplaceScatter": "x.scatter_(1, places, y)",
    "aclnnScatterValue": "torch.scatter(x, 1, places, 2.0)",
    "aclnnInplaceScatterValue": "x.scatter_(1, places, 2.0)",
    "aclnnScatterAdd": "torch.scatter_add(x, 1, places, y)",
    "aclnnRepeatInterleave": "torch.repeat_interleave(x[:, 0], counts)",
    "aclnnRepeatInterleaveWithDim": "torch.repeat_interleave(x, counts, dim=0)",
    "aclnnRepeatInterleaveInt": "torch.repeat_interleave(x, 2)",
    "aclnnRepeatInterleaveIntWithDim": "torch.repeat_interleave(x, 2, dim=1)",
    "aclnnRepeatInterleaveTensor": "torch.repeat_interleave(counts)",
    "aclnnMaskedSelect": "torch.masked_select(x, mask)",
    "aclnnNonzero": "torch.nonzero(mask)",
    "aclnnNonzeroV2": "x[mask]",
    # Comparisons.
    "aclnnEqual": "torch.equal(x, x + 0)",
    "aclnnIsClose": "torch.isclose(x, x + 1e-7)",
    "aclnnEqTensor": "i == j",
    "aclnnEqScalar": "i == 1",
    "aclnnNeTensor": "i != j",
    "aclnnNeScalar": "i != 1",
    "aclnnLtTensor": "i < j",
    "aclnnLtScalar": "i < 1",
    "aclnnLeTensor": "i <= j",
    "aclnnLeScalar": "i <= 1",
    "aclnnGtTensor": "i > j",
    "aclnnGtScalar": "i > 1",
    "aclnnGeTensor": "i >= j",
    "aclnnGeScalar": "i >= 1",
    "aclnnIsFinite": "torch.isfinite(odd)",
    "aclnnIsPosInf": "torch.isposinf(odd)",
    "aclnnIsNegInf": "torch.isneginf(odd)",
    # Truth values and bits.
    "aclnnLogicalNot": "torch.logical_not(mask)",
    "aclnnLogicalAnd": "torch.logical_and(mask, x > 0)",
    "aclnnLogicalOr": "torch.logical_or(mask, x > 0)",
    "aclnnLogicalXor": "torch.logical_xor(mask, x > 0)",
    "aclnnBitwiseNot": "~i",
    "aclnnBitwiseAndTensor": "i & j",
    "aclnnBitwiseAndScalar": "i & 6",
    "aclnnBitwiseOrTensor": "i | j",
    "aclnnBitwiseOrScalar": "i | 6",
    "aclnnBitwiseXorTensor": "i ^ j",
    "aclnnBitwiseXorScalar": "i ^ 6",
    "aclnnInplaceBitwiseAndTensor": "i &= j",
    "aclnnInplaceBitwiseAndScalar": "i &= 6",
    # Arithmetic.
    "aclnnAdd": "torch.add(x, y, alpha=2)",
    "aclnnAdds": "x + 1.5",
    "aclnnInplaceAdd": "x += y",
    "aclnnInplaceAdds": "x += 1.5",
    "aclnnSub": "torch.sub(x, y, alpha=2)",
    "aclnnSubs": "x - 1.5",
    "aclnnInplaceSub": "x -= y",
    "aclnnInplaceSubs": "x -= 1.5",
    "aclnnRsub": "torch.rsub(x, y, alpha=2)",
    "aclnnRsubs": "1.5 - x",
    "aclnnMul": "x * y",
    "aclnnMuls": "x * 1.5",
    "aclnnInplaceMul": "x *= y",
    "aclnnInplaceMuls": "x *= 1.5",
    "aclnnDiv": "x / some",
    "aclnnDivs": "x / 1.5",
    "aclnnInplaceDiv": "x /= some",
    "aclnnInplaceDivs": "x /= 1.5",
    "aclnnDivMod": "torch.div(x, some, rounding_mode='floor')",
    "aclnnDivMods": "torch.div(x, 0.5, rounding_mode='trunc')",
    "aclnnFloorDivide": "i // j",
    "aclnnFloorDivides": "i // 4",
    "aclnnInplaceFloorDivide": "i //= j",
    "aclnnInplaceFloorDivides": "i //= 4",
    "aclnnRemainderTensorTensor": "i % j",
    "aclnnRemainderTensorScalar": "i % 4",
    "aclnnInplaceRemainderTensorTensor": "i %= j",
    "aclnnInplaceRemainderTensorScalar": "i %= 4",
    "aclnnPowTensorScalar": "x**3",
    "aclnnPowTensorTensor": "some**x",
    "aclnnPowScalarTensor": "100**x",
    "aclnnInplacePowTensorScalar": "x **= 3",
    "aclnnMaximum": "torch.maximum(x, y)",
    "aclnnMinimum": "torch.minimum(x, y)",
    "aclnnClamp": "torch.clamp(x, -0.5, 0.5)",
    "aclnnClampMin": "torch.clamp_min(x, -0.5)",
    "aclnnClampMax": "torch.clamp_max(x, 0.5)",
    "aclnnInplaceClampMax": "x.clamp_max_(0.5)",
    "aclnnClampMinTensor": "torch.clamp_min(x, y)",
    "aclnnClampMaxTensor": "torch.clamp_max(x, y)",
    "aclnnClampTensor": "torch.clamp(x, y, y + 0.5)",
    "aclnnThreshold": "torch.nn.functional.threshold(x, 0.5, -3.0)",
    "aclnnInplaceThreshold": "torch.threshold_(x, 0.5, -3.0)",
    "aclnnNanToNum": "torch.nan_to_num(odd, nan=0.5)",
    "aclnnSWhere": "torch.where(mask, x, y)",
    "aclnnInplaceMaskedFillScalar": "x.masked_fill_(mask, 2.5)",
    "aclnnInplaceMaskedFillTensor": "x.masked_fill_(mask, number)",
    # Functions of one number.
    "aclnnExp": "torch.exp(x)",
    "aclnnInplaceExp": "x.exp_()",
    "aclnnLog": "torch.log(some)",
    "aclnnInplaceLog": "some.log_()",
    "aclnnSqrt": "torch.sqrt(some)",
    "aclnnRsqrt": "torch.rsqrt(some)",
    "aclnnReciprocal": "torch.reciprocal(some)",
    "aclnnSin": "torch.sin(x)",
    "aclnnCos": "torch.cos(x)",
    "aclnnSigmoid": "torch.sigmoid(x)",
    "aclnnSilu": "torch.nn.functional.silu(x)",
    "aclnnRelu": "torch.nn.functional.relu(x)",
    "aclnnInplaceRelu": "x.relu_()",
    "aclnnGelu": ("torch.nn.functional.gelu(x)", "torch.nn.functional.gelu(x, approximate='tanh')"),
    "aclnnGeluV2": ("torch_npu.npu_gelu(x)", "torch.nn.functional.gelu(x)"),
    "aclnnTanh": "torch.tanh(x)",
    "aclnnNeg": "-x",
    "aclnnAbs": "torch.abs(x)",
    "aclnnSign": "torch.sign(x)",
    "aclnnFloor": "torch.floor(x)",
    "aclnnCeil": "torch.ceil(x)",
    "aclnnRound": "torch.round(x)",
    "aclnnTrunc": "torch.trunc(x)",
    "aclnnInplaceSqrt": "some.sqrt_()",
    "aclnnInplaceRsqrt": "some.rsqrt_()",
    "aclnnInplaceReciprocal": "some.reciprocal_()",
    "aclnnInplaceSigmoid": "x.sigmoid_()",
    "aclnnInplaceFloor": "x.floor_()",
    "aclnnInplaceCeil": "x.ceil_()",
    # Lines of elements.
    "aclnnReduceSum": "torch.sum(x, 1)",
    "aclnnMean": "torch.mean(x, 1)",
    "aclnnProd": "torch.prod(x)",
    "aclnnProdDim": "torch.prod(x, 1)",
    "aclnnMax": "torch.max(x)",
    "aclnnMin": "torch.min(x)",
    "aclnnAmax": "torch.amax(x, 1)",
    "aclnnAmin": "torch.amin(x, 1)",
    "aclnnMaxDim": "torch.max(x, 1)",
    "aclnnMinDim": "torch.min(x, 1)",
    "aclnnArgMax": "torch.argmax(x, 1)",
    "aclnnArgMin": "torch.argmin(x, 1)",
    "aclnnAny": "torch.any(mask, 1)",
    "aclnnAll": "torch.all(mask, 1)",
    "aclnnVarCorrection": "torch.var(x, 1)",
    "aclnnStd": "torch.std(x, 1)",
    "aclnnLinalgVectorNorm": "torch.linalg.vector_norm(x, dim=1)",
    "aclnnLogSumExp": "torch.logsumexp(x, 1)",
    "aclnnSoftmax": "torch.softmax(x, 1)",
    "aclnnLogSoftmax": "torch.log_softmax(x, 1)",
    "aclnnCumsum": "torch.cumsum(x, 1)",
    "aclnnSort": "torch.sort(x, 1)",
    "aclnnTopk": "torch.topk(x, 3)",
    # Of models.
    "aclnnLayerNorm": "torch.nn.functional.layer_norm(x, (6,), row, row)",
    "aclnnAddRmsNorm": (
        "torch_npu.npu_add_rms_norm(x, y, row, 1e-6)",
        "((x + y) * root(x + y) * row, root(x + y), x + y)",
    ),
    "aclnnSwiGlu": ("torch_npu.npu_swiglu(x, 1)", "torch.nn.functional.silu(x[:, :3]) * x[:, 3:]"),
    "aclnnGeGluV3": (
        "torch_npu.npu_geglu(x, 0, 0, True)",
        "(torch.nn.functional.gelu(x[:2]) * x[2:], torch.nn.functional.gelu(x[:2]))",
    ),
    "aclnnRotaryPositionEmbedding": (
        "torch_npu.npu_rotary_mul(heads, cos, sin)",
        "heads * cos + torch.cat([-heads[..., 32:], heads[..., :32]], -1) * sin",
    ),
    "aclnnInterleaveRope": (
        "torch_npu.npu_interleave_rope(heads, cos, sin)",
        "apart * cos + torch.cat([-apart[..., 32:], apart[..., :32]], -1) * sin",
    ),
    "aclnnApplyRotaryPosEmbV2": (
        "torch_npu.npu_apply_rotary_pos_emb(heads, more_heads, angles, angles + 1)",
        "(heads.copy_(turn(heads, angles, angles + 1)), more_heads.copy_(turn(more_heads, angles, angles + 1)))",
    ),
    "aclnnRopeWithSinCosCache": (
        "torch_npu.npu_mrope(chosen, flat, flat + 1, table, 64, mrope_section=[0, 0, 0])",
        "(turn_by_table(chosen, flat, table), turn_by_table(chosen, flat + 1, table))",
    ),
    "aclnnKvRmsNormRopeCache": (
        "torch_npu.npu_kv_rmsnorm_rope_cache(tokens, norm, angle, angle + 1, slots, keys, latents,"
        " cache_mode='PA_BNSD', is_output_kv=True)",
        "cached(tokens, norm, angle, angle + 1, slots, keys, latents)",
    ),
    "aclnnDynamicQuant": (
        "torch_npu.npu_dynamic_quant(half)[1]",
        "half.float().abs().amax(1) / 127",
    ),
    "aclnnScatterNdUpdate": ("torch_npu.npu_scatter_nd_update_(x, chosen[:, None], y[:3])", "x.index_copy_(0, chosen, y[:3])"),
    # Products.
    "aclnnMatmul": "torch.matmul(x, y.t())",
    "aclnnMm": "torch.mm(x, y.t())",
    "aclnnTransposeBatchMatMul": (
        "torch_npu.npu_transpose_batchmatmul(batches, factors)",
        "torch.bmm(batches.float(), factors.float()).half().transpose(0, 1)",
    ),
    "aclnnWeightQuantBatchMatmulV2": (
        "torch_npu.npu_weight_quant_batchmatmul(half, codes, scales)",
        "(half.float() @ (codes.half() * scales).float()).half()",
    ),
    "aclnnDot": "torch.dot(row, x[0])",
    "aclnnMv": "torch.mv(x, row)",
    "aclnnAddmm": "torch.addmm(row[:4], x, y.t(), beta=0.5, alpha=2)",
    "aclnnBaddbmm": "torch.baddbmm(stack[:, :, :1], stack, stack.transpose(1, 2), beta=0.5)",
}

# Operators that programs in C call, and nothing in PyTorch.
FROM_C = {"aclnnPermute", "aclnnSlice", "aclnnGatherV2", "aclnnArgsort"}

# Operators that not every version of the extension calls on this product; modules of other products see them.
ELSEWHERE = {"aclnnNpuFormatCast"}

# Operators that the extension calls only where the toolkit lacks a newer version.
OLDER = {"aclnnApplyRotaryPosEmb"}

# By version of the extension, operators that it does not call for the same line, and what it calls: another operator,
# or, where the host computes, none.
INSTEAD = {
    (2, 10): {"aclnnInplaceCeil": "aclnnCeil", "aclnnRepeatInterleaveTensor": None},
}
VERSION = tuple(int(part) for part in torch_npu.__version__.split(".")[:2])

# Operators with rules of their own that code calls as it does the small ones.
RULED = {
    "aclnnBatchMatMul": ["torch.bmm(stack, stack.transpose(1, 2))", "torch.einsum('bij,bkj->bik', stack, stack)"],
    "aclnnRmsNorm": [
        (
            "torch_npu.npu_rms_norm(x, row, 1e-6)[0]",
            "x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6) * row",
        ),
    ],
}


def turn(x, cos, sin):
    """Rotates elements half a line apart."""
    half = x.shape[-1] // 2
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


def turn_by_table(positions, x, table):
    """Rotates heads of 64 elements by the rows of a table of cosines and sines."""
    cos, sin = (torch.cat([part, part], -1)[:, None] for part in table[positions].chunk(2, -1))
    return turn(x.view(len(x), -1, 64), cos, sin).view_as(x)


def cached(tokens, norm, cos, sin, slots, keys, latents):
    """Normalises latents, rotates keys, and puts both into caches of blocks."""
    whole, latent, rotated = tokens.float(), norm.shape[0], cos.shape[-1]
    c, k = whole[..., :latent], whole[..., latent:]
    c = (c * torch.rsqrt(c.square().mean(-1, keepdim=True) + 1e-5) * norm.float()).half()
    k = torch.cat([k[..., 0::2], k[..., 1::2]], -1)
    k = turn(k, cos.float(), sin.float()).half()
    keys.view(-1, rotated)[slots] = k.reshape(-1, rotated)
    latents.view(-1, latent)[slots] = c.reshape(-1, latent)
    return keys, latents, k, c


def names(device):
    """What the lines of `CALLS` speak of, the same on each device."""
    numbers = torch.Generator().manual_seed(7)

    def normal(*shape):
        return torch.randn(*shape, generator=numbers)

    def whole(least, greatest):
        return torch.randint(least, greatest, (4, 6), generator=numbers)

    heads = normal(2, 3, 1, 64)
    tensors = {
        "x": normal(4, 6),
        "y": normal(4, 6),
        "some": normal(4, 6).abs() + 0.5,
        "odd": torch.tensor([1.0, float("nan"), float("inf"), -float("inf")]),
        "half": normal(4, 6).half(),
        "row": normal(6),
        "number": torch.tensor(1.5),
        "stack": normal(2, 4, 6),
        "i": whole(-9, 9),
        "j": whole(1, 5),
        "mask": normal(4, 6) > 0,
        "chosen": torch.tensor([2, 0, 3]),
        "places": torch.tensor([[0, 5], [2, 1], [3, 4], [5, 0]]),
        "counts": torch.tensor([2, 0, 3, 1]),
        "heads": heads,
        "apart": torch.cat([heads[..., 0::2], heads[..., 1::2]], -1),
        "cos": normal(2, 1, 1, 64),
        "sin": normal(2, 1, 1, 64),
        "more_heads": normal(2, 3, 2, 64),
        "angles": normal(2, 3, 1, 64),
        "flat": normal(3, 128),
        "table": normal(4, 64),
        "tokens": normal(3, 1, 2, 576).half(),
        "norm": normal(512).half(),
        "angle": normal(3, 1, 2, 64).half(),
        "slots": torch.tensor([17, 3, 30, 0, 16, 9]),
        "keys": normal(2, 16, 1, 64).half(),
        "latents": normal(2, 16, 1, 512).half(),
        "batches": normal(2, 3, 128).half(),
        "factors": normal(2, 128, 128).half(),
        "codes": torch.randint(-9, 9, (6, 5), generator=numbers).to(torch.int8),
        "scales": normal(5).half(),
    }
    return {name: tensor.to(device) for name, tensor in tensors.items()} | {
        "torch": torch,
        "torch_npu": torch_npu,
        "device": device,
        "turn": turn,
        "turn_by_table": turn_by_table,
        "cached": cached,
        "root": lambda x: torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-6),
    }


def done(line, device):
    """What a line gives, and what it leaves behind."""
    known = names(device)
    try:
        result = eval(compile(line, "<line>", "eval"), known)
    except SyntaxError:
        exec(line, known)
        result = None
    results = list(result) if isinstance(result, (tuple, list)) else [result]
    return results + [value for value in known.values() if isinstance(value, torch.Tensor)]


def compare(actual, expected):
    if not isinstance(expected, torch.Tensor):
        assert actual == expected, f"{actual}, not {expected}"
        return
    actual = actual.cpu()
    assert actual.shape == expected.shape, f"shape {tuple(actual.shape)}, not {tuple(expected.shape)}"
    assert actual.dtype == expected.dtype, f"{actual.dtype}, not {expected.dtype}"
    # Half numbers may differ in the last bit.
    bounds = {"rtol": 2e-3, "atol": 1e-4} if actual.dtype == torch.float16 else {"rtol": 1e-5, "atol": 1e-6}
    assert torch.allclose(actual, expected, **bounds, equal_nan=True), f"{actual}, not {expected}"


@case(operator=list(CALLS))
def called_from_python(operator):
    called(operator, CALLS[operator])


@case(operator=list(RULED))
def ruled_called_from_python(operator):
    for line in RULED[operator]:
        called(operator, line)


def called(operator, line):
    line, on_host = (line, line) if isinstance(line, str) else line
    Trace.new()
    results = done(line, "npu")
    after = [function for function in Trace.new() if function.startswith("aclnn")]
    for actual, expected in zip(results, done(on_host, "cpu"), strict=True):
        compare(actual, expected)
    expected = INSTEAD.get(VERSION, {}).get(operator, operator)
    assert expected in after if expected else not after, f"{line} called {after}"


@case()
def every_operator_is_called():
    table = pathlib.Path(__file__).parents[2] / "ascend-emu/src/glue/table.rs"
    operators = set(re.findall(r"fn (aclnn\w+)", table.read_text(encoding="utf-8")))
    known = set(CALLS) | FROM_C | OLDER | ELSEWHERE
    assert operators == known, f"not in both: {operators ^ known}"


@case()
def what_c_alone_calls_is_unknown_to_the_extension():
    libraries = pathlib.Path(torch_npu.__file__).parent.glob("**/lib*.so")
    names = b"".join(library.read_bytes() for library in libraries)
    known = {operator for operator in FROM_C if f"\0{operator}\0".encode() in names}
    assert not known, f"the extension may call {known}"
