//! The table of the operators.

/// Calls a macro with every operator: what calls it, its C name, its parameters in C's order with the types of this
/// module, and the function that checks a call and says what a launch does.
///
/// The parameters are those of CANN's documentation of `aclnn<name>GetWorkspaceSize` before `workspaceSize`. What
/// calls it is written as PyTorch code that reaches it through `torch_npu`, or in words where no such code does.
#[macro_export]
macro_rules! for_each_glue_function {
    ($with:ident) => {
        $with! {
            // Copies.
            /// `Tensor.copy_`, `.contiguous()`, `.clone()`, `.to(dtype)`, `.npu()` of a strided tensor.
            fn aclnnInplaceCopy(selfRef: InOut, src: In) = fill::copy;
            /// `torch_npu.npu_dtype_cast`.
            fn aclnnCast(self_: In, dtype: Type, out: Out) = fill::cast;
            /// `torch_npu.npu_format_cast`: on Ascend 950, and elsewhere by some versions of the extension.
            fn aclnnNpuFormatCast(srcTensor: InStored, dstTensor: OutStored) = format_cast::npu_format_cast;
            /// `torch.cat`.
            fn aclnnCat(tensors: Ins, dim: i64, out: Out) = join::concatenate;
            /// `torch.stack`.
            fn aclnnStack(tensors: Ins, dim: i64, out: Out) = join::stack;
            /// `Tensor.repeat`.
            fn aclnnRepeat(self_: In, repeats: Ints, out: Out) = fill::repeat;
            /// ggml's permuted tensors.
            fn aclnnPermute(self_: In, dims: Ints, out: Out) = fill::permute;
            /// ggml's parts of tensors.
            fn aclnnSlice(self_: In, dim: i64, start: i64, end: i64, step: i64, out: Out) = parts::slice;
            /// `torch.flip`.
            fn aclnnFlip(self_: In, dims: Ints, out: Out) = fill::flip;
            /// `torch.nn.functional.pad`.
            fn aclnnConstantPadNd(self_: In, pad: Ints, value: Scalar, out: Out) = fill::pad;

            // New numbers.
            /// `Tensor.fill_`, `torch.full`.
            fn aclnnInplaceFillScalar(selfRef: InOutShared, value: Scalar) = fill::fill;
            /// `Tensor.fill_` with a tensor.
            fn aclnnInplaceFillTensor(selfRef: InOutShared, value: In) = fill::fill_tensor;
            /// `Tensor.zero_`, `torch.zeros`.
            fn aclnnInplaceZero(selfRef: InOutShared) = fill::zero;
            /// `torch.ones`.
            fn aclnnInplaceOne(selfRef: InOutShared) = |target| fill::fill(target, Number::Int(1));
            /// `torch.arange`.
            fn aclnnArange(start: Scalar, end: Scalar, step: Scalar, out: Out) = fill::arange;
            /// `torch.eye`.
            fn aclnnEye(n: i64, m: i64, out: Out) = fill::eye;
            /// `torch.triu`.
            fn aclnnTriu(self_: In, diagonal: i64, out: Out) = fill::triangle(true);
            /// `torch.tril`.
            fn aclnnTril(self_: In, diagonal: i64, out: Out) = fill::triangle(false);
            /// `Tensor.triu_`.
            fn aclnnInplaceTriu(selfRef: InOut, diagonal: i64) =
                |own, diagonal| fill::triangle(true)(own, diagonal, own);
            /// `Tensor.tril_`.
            fn aclnnInplaceTril(selfRef: InOut, diagonal: i64) =
                |own, diagonal| fill::triangle(false)(own, diagonal, own);
            /// `torch.randn`, `Tensor.normal_`.
            fn aclnnInplaceNormal(selfRef: InOut, mean: f32, std: f32, seed: i64, offset: i64) = fill::normal;
            /// `torch.rand`, `Tensor.uniform_`.
            fn aclnnInplaceUniform(selfRef: InOut, from: f64, to: f64, seed: u64, offset: u64) = fill::uniform;
            /// `torch.randint`, `Tensor.random_`.
            fn aclnnInplaceRandom(selfRef: InOut, from: i64, to: i64, seed: i64, offset: i64) =
                fill::random_integer;
            /// `torch_npu._npu_dropout_gen_mask`, dropout of `torch_npu.npu_fusion_attention`.
            fn aclnnDropoutGenMaskV2(
                shape: Ints, prob: f64, seed: i64, offset: i64, probDataType: Type, out: Out
            ) = fill::dropout_mask;

            // By positions.
            /// `x[i, j]` with tensors of integers.
            fn aclnnIndex(self_: In, indices: Ins, out: Out) = select::index;
            /// `x[i, j] = y`.
            fn aclnnIndexPutImpl(selfRef: InOutShared, indices: Ins, values: In, accumulate: Flag, unsafe_: Flag) =
                select::index_put;
            /// `torch.index_select`.
            fn aclnnIndexSelect(self_: In, dim: i64, index: In, out: Out) = parts::index_select;
            /// ggml's rows of tables.
            fn aclnnGatherV2(self_: In, dim: i64, index: In, out: Out) = parts::gather;
            /// `Tensor.index_copy_`.
            fn aclnnInplaceIndexCopy(selfRef: InOut, dim: i64, index: In, source: In) = parts::index_copy;
            /// `torch.gather`.
            fn aclnnGather(self_: In, dim: i64, index: In, out: Out) = select::gather;
            /// `torch.nn.functional.embedding`.
            fn aclnnEmbedding(weight: In, indices: In, out: Out) = select::embedding;
            /// `torch.scatter`.
            fn aclnnScatter(self_: In, dim: i64, index: In, src: In, reduce: i64, out: Out) = select::scatter;
            /// `Tensor.scatter_`.
            fn aclnnInplaceScatter(selfRef: InOut, dim: i64, index: In, src: In, reduce: i64) =
                |own, dim, index, src, reduce| select::scatter(own, dim, index, src, reduce, own);
            /// `torch.scatter` of a number.
            fn aclnnScatterValue(self_: In, dim: i64, index: In, value: Scalar, reduce: i64, out: Out) =
                select::scatter_value;
            /// `Tensor.scatter_` of a number.
            fn aclnnInplaceScatterValue(selfRef: InOut, dim: i64, index: In, value: Scalar, reduce: i64) =
                |own, dim, index, value, reduce| select::scatter_value(own, dim, index, value, reduce, own);
            /// `torch.scatter_add`.
            fn aclnnScatterAdd(self_: In, dim: i64, index: In, src: In, out: Out) = select::scatter_add;
            /// `torch.repeat_interleave` of the flattened tensor.
            fn aclnnRepeatInterleave(self_: In, repeats: In, outputSize: i64, out: Out) =
                join::repeat_interleave;
            /// `torch.repeat_interleave` along an axis.
            fn aclnnRepeatInterleaveWithDim(self_: In, repeats: In, dim: i64, outputSize: i64, out: Out) =
                join::repeat_interleave_along;
            /// `torch.repeat_interleave` of the flattened tensor with one count.
            fn aclnnRepeatInterleaveInt(self_: In, repeats: i64, outputSize: i64, out: Out) =
                join::repeat_interleave_count;
            /// `torch.repeat_interleave` along an axis with one count.
            fn aclnnRepeatInterleaveIntWithDim(self_: In, repeats: i64, dim: i64, outputSize: i64, out: Out) =
                join::repeat_interleave_count_along;
            /// `torch.repeat_interleave` of counts alone: request of each token.
            fn aclnnRepeatInterleaveTensor(repeats: In, outputSize: i64, out: Out) = join::repeat_places;
            /// `torch.masked_select`; printing a tensor.
            fn aclnnMaskedSelect(self_: In, mask: In, out: Out) = select::masked_select;
            /// `torch.nonzero`.
            fn aclnnNonzero(self_: In, out: Out) = select::nonzero(true);
            /// `x[mask]`, `x[mask] = y`.
            fn aclnnNonzeroV2(self_: In, out: Out) = select::nonzero(false);

            // Comparisons.
            /// `torch.equal`.
            fn aclnnEqual(self_: In, other: In, out: Out) = compare::equal;
            /// `torch.isclose`, `torch.allclose`.
            fn aclnnIsClose(self_: In, other: In, rtol: f64, atol: f64, equalNan: Flag, out: Out) =
                compare::is_close;
            /// `a == b`.
            fn aclnnEqTensor(self_: In, other: In, out: Out) = compare::tensors(compare::EQ);
            /// `a == 1`.
            fn aclnnEqScalar(self_: In, other: Scalar, out: Out) = compare::with_scalar(compare::EQ);
            /// `a != b`, `torch.isnan`.
            fn aclnnNeTensor(self_: In, other: In, out: Out) = compare::tensors(compare::NE);
            /// `a != 1`.
            fn aclnnNeScalar(self_: In, other: Scalar, out: Out) = compare::with_scalar(compare::NE);
            /// `a < b`.
            fn aclnnLtTensor(self_: In, other: In, out: Out) = compare::tensors(compare::LT);
            /// `a < 1`.
            fn aclnnLtScalar(self_: In, other: Scalar, out: Out) = compare::with_scalar(compare::LT);
            /// `a <= b`.
            fn aclnnLeTensor(self_: In, other: In, out: Out) = compare::tensors(compare::LE);
            /// `a <= 1`.
            fn aclnnLeScalar(self_: In, other: Scalar, out: Out) = compare::with_scalar(compare::LE);
            /// `a > b`.
            fn aclnnGtTensor(self_: In, other: In, out: Out) = compare::tensors(compare::GT);
            /// `a > 1`.
            fn aclnnGtScalar(self_: In, other: Scalar, out: Out) = compare::with_scalar(compare::GT);
            /// `a >= b`.
            fn aclnnGeTensor(self_: In, other: In, out: Out) = compare::tensors(compare::GE);
            /// `a >= 1`.
            fn aclnnGeScalar(self_: In, other: Scalar, out: Out) = compare::with_scalar(compare::GE);
            /// `torch.isfinite`; printing a tensor.
            fn aclnnIsFinite(self_: In, out: Out) = compare::test(true, f64::is_finite);
            /// `torch.isposinf`.
            fn aclnnIsPosInf(self_: In, out: Out) = compare::test(false, |value| value == f64::INFINITY);
            /// `torch.isneginf`.
            fn aclnnIsNegInf(self_: In, out: Out) = compare::test(false, |value| value == f64::NEG_INFINITY);

            // Truth values and bits.
            /// `torch.logical_not`.
            fn aclnnLogicalNot(self_: In, out: Out) = compare::logical_not;
            /// `torch.logical_and`.
            fn aclnnLogicalAnd(self_: In, other: In, out: Out) = compare::logical(|a, b| a && b);
            /// `torch.logical_or`.
            fn aclnnLogicalOr(self_: In, other: In, out: Out) = compare::logical(|a, b| a || b);
            /// `torch.logical_xor`.
            fn aclnnLogicalXor(self_: In, other: In, out: Out) = compare::logical(|a, b| a != b);
            /// `~mask`.
            fn aclnnBitwiseNot(self_: In, out: Out) = element::bitwise_not;
            /// `a & b`.
            fn aclnnBitwiseAndTensor(self_: In, other: In, out: Out) = element::bitwise(|a, b| a & b);
            /// `a & 1`.
            fn aclnnBitwiseAndScalar(self_: In, other: Scalar, out: Out) = element::bitwise_scalar(|a, b| a & b);
            /// `a | b`, `a |= b`.
            fn aclnnBitwiseOrTensor(self_: In, other: In, out: Out) = element::bitwise(|a, b| a | b);
            /// `a | 1`, `a |= 1`.
            fn aclnnBitwiseOrScalar(self_: In, other: Scalar, out: Out) = element::bitwise_scalar(|a, b| a | b);
            /// `a ^ b`.
            fn aclnnBitwiseXorTensor(self_: In, other: In, out: Out) = element::bitwise(|a, b| a ^ b);
            /// `a ^ 1`.
            fn aclnnBitwiseXorScalar(self_: In, other: Scalar, out: Out) = element::bitwise_scalar(|a, b| a ^ b);
            /// `a &= b`.
            fn aclnnInplaceBitwiseAndTensor(selfRef: InOut, other: In) =
                |own, other| element::bitwise(|a, b| a & b)(own, other, own);
            /// `a &= 1`.
            fn aclnnInplaceBitwiseAndScalar(selfRef: InOut, other: Scalar) =
                |own, other| element::bitwise_scalar(|a, b| a & b)(own, other, own);

            // Arithmetic.
            /// `a + b`.
            fn aclnnAdd(self_: In, other: In, alpha: Scalar, out: Out) = element::scaled(element::ADD);
            /// `a + 1`.
            fn aclnnAdds(self_: In, other: Scalar, alpha: Scalar, out: Out) = element::scaled_scalar(element::ADD);
            /// `a += b`.
            fn aclnnInplaceAdd(selfRef: InOut, other: In, alpha: Scalar) =
                |own, other, alpha| element::scaled(element::ADD)(own, other, alpha, own);
            /// `a += 1`.
            fn aclnnInplaceAdds(selfRef: InOut, other: Scalar, alpha: Scalar) =
                |own, other, alpha| element::scaled_scalar(element::ADD)(own, other, alpha, own);
            /// `a - b`.
            fn aclnnSub(self_: In, other: In, alpha: Scalar, out: Out) = element::scaled(element::SUB);
            /// `a - 1`.
            fn aclnnSubs(self_: In, other: Scalar, alpha: Scalar, out: Out) = element::scaled_scalar(element::SUB);
            /// `a -= b`.
            fn aclnnInplaceSub(selfRef: InOut, other: In, alpha: Scalar) =
                |own, other, alpha| element::scaled(element::SUB)(own, other, alpha, own);
            /// `a -= 1`.
            fn aclnnInplaceSubs(selfRef: InOut, other: Scalar, alpha: Scalar) =
                |own, other, alpha| element::scaled_scalar(element::SUB)(own, other, alpha, own);
            /// `torch.rsub`.
            fn aclnnRsub(self_: In, other: In, alpha: Scalar, out: Out) =
                |own, other, alpha, out| element::scaled(element::SUB)(other, own, alpha, out);
            /// `1 - a`.
            fn aclnnRsubs(self_: In, other: Scalar, alpha: Scalar, out: Out) = element::subtract_from;
            /// `a * b`.
            fn aclnnMul(self_: In, other: In, out: Out) = element::binary(element::MUL);
            /// `a * 2`.
            fn aclnnMuls(self_: In, other: Scalar, out: Out) = element::with_scalar(element::MUL);
            /// `a *= b`.
            fn aclnnInplaceMul(selfRef: InOut, other: In) =
                |own, other| element::binary(element::MUL)(own, other, own);
            /// `a *= 2`.
            fn aclnnInplaceMuls(selfRef: InOut, other: Scalar) =
                |own, other| element::with_scalar(element::MUL)(own, other, own);
            /// `a / b`.
            fn aclnnDiv(self_: In, other: In, out: Out) = element::divide(0);
            /// `a / 2`.
            fn aclnnDivs(self_: In, other: Scalar, out: Out) = element::divide_by_scalar(0);
            /// `a /= b`.
            fn aclnnInplaceDiv(selfRef: InOut, other: In) = |own, other| element::divide(0)(own, other, own);
            /// `a /= 2`.
            fn aclnnInplaceDivs(selfRef: InOut, other: Scalar) =
                |own, other| element::divide_by_scalar(0)(own, other, own);
            /// `torch.div` with a rounding mode.
            fn aclnnDivMod(self_: In, other: In, mode: i32, out: Out) =
                |own, other, mode, out| element::divide(mode)(own, other, out);
            /// `torch.div` by a number with a rounding mode.
            fn aclnnDivMods(self_: In, other: Scalar, mode: i32, out: Out) =
                |own, other, mode, out| element::divide_by_scalar(mode)(own, other, out);
            /// `a // b`.
            fn aclnnFloorDivide(self_: In, other: In, out: Out) = element::divide(2);
            /// `a // 128`: blocks of a paged cache.
            fn aclnnFloorDivides(self_: In, other: Scalar, out: Out) = element::divide_by_scalar(2);
            /// `a //= b`.
            fn aclnnInplaceFloorDivide(selfRef: InOut, other: In) =
                |own, other| element::divide(2)(own, other, own);
            /// `a //= 128`.
            fn aclnnInplaceFloorDivides(selfRef: InOut, other: Scalar) =
                |own, other| element::divide_by_scalar(2)(own, other, own);
            /// `a % b`.
            fn aclnnRemainderTensorTensor(self_: In, other: In, out: Out) =
                element::binary(element::REMAINDER);
            /// `a % 128`: places in blocks of a paged cache.
            fn aclnnRemainderTensorScalar(self_: In, other: Scalar, out: Out) =
                element::with_scalar(element::REMAINDER);
            /// `a %= b`.
            fn aclnnInplaceRemainderTensorTensor(selfRef: InOut, other: In) =
                |own, other| element::binary(element::REMAINDER)(own, other, own);
            /// `a %= 128`.
            fn aclnnInplaceRemainderTensorScalar(selfRef: InOut, other: Scalar) =
                |own, other| element::with_scalar(element::REMAINDER)(own, other, own);
            /// `a ** 2`.
            fn aclnnPowTensorScalar(self_: In, exponent: Scalar, out: Out) = element::with_scalar(element::POW);
            /// `a ** b`.
            fn aclnnPowTensorTensor(self_: In, exponent: In, out: Out) = element::binary(element::POW);
            /// `10000 ** a`: frequencies of rotary positions.
            fn aclnnPowScalarTensor(self_: Scalar, exponent: In, out: Out) = element::of_scalar(element::POW);
            /// `a **= 2`.
            fn aclnnInplacePowTensorScalar(self_: InOut, exponent: Scalar) =
                |own, exponent| element::with_scalar(element::POW)(own, exponent, own);
            /// `torch.maximum`.
            fn aclnnMaximum(self_: In, other: In, out: Out) = element::binary(element::MAX);
            /// `torch.minimum`.
            fn aclnnMinimum(self_: In, other: In, out: Out) = element::binary(element::MIN);
            /// `torch.clamp`.
            fn aclnnClamp(self_: In, clipValueMin: OptionalScalar, clipValueMax: OptionalScalar, out: Out) =
                choose::clamp;
            /// `torch.clamp_min`.
            fn aclnnClampMin(self_: In, clipValueMin: Scalar, out: Out) =
                |own, least, out| choose::clamp(own, Some(least), None, out);
            /// `torch.clamp_max`.
            fn aclnnClampMax(self_: In, clipValueMax: Scalar, out: Out) =
                |own, most, out| choose::clamp(own, None, Some(most), out);
            /// `Tensor.clamp_max_`.
            fn aclnnInplaceClampMax(selfRef: InOut, clipValueMax: Scalar) =
                |own, most| choose::clamp(own, None, Some(most), own);
            /// `torch.clamp_min` with a tensor.
            fn aclnnClampMinTensor(self_: In, clipValueMin: In, out: Out) = element::binary(element::MAX);
            /// `torch.clamp_max` with a tensor.
            fn aclnnClampMaxTensor(self_: In, max: In, out: Out) = element::binary(element::MIN);
            /// `torch.clamp` with tensors.
            fn aclnnClampTensor(self_: In, clipValueMin: OptionalIn, clipValueMax: OptionalIn, out: Out) =
                choose::clamp_between;
            /// `torch.nn.functional.threshold`.
            fn aclnnThreshold(self_: In, threshold: Scalar, value: Scalar, out: Out) = choose::threshold;
            /// `torch.threshold_`.
            fn aclnnInplaceThreshold(selfRef: InOut, threshold: Scalar, value: Scalar) =
                |own, threshold, value| choose::threshold(own, threshold, value, own);
            /// `torch.nan_to_num`.
            fn aclnnNanToNum(self_: In, nan: f32, posinf: f32, neginf: f32, out: Out) = choose::nan_to_num;
            /// `torch.where`.
            fn aclnnSWhere(condition: In, self_: In, other: In, out: Out) = choose::by_condition;
            /// `Tensor.masked_fill_`.
            fn aclnnInplaceMaskedFillScalar(selfRef: InOutShared, mask: In, value: Scalar) = choose::masked_fill;
            /// `Tensor.masked_fill_` with a tensor.
            fn aclnnInplaceMaskedFillTensor(selfRef: InOutShared, mask: In, value: In) = choose::masked_fill_tensor;

            // Functions of one number.
            /// `torch.exp`.
            fn aclnnExp(self_: In, out: Out) = element::real(f64::exp);
            /// `Tensor.exp_`.
            fn aclnnInplaceExp(selfRef: InOut) = |own| element::real(f64::exp)(own, own);
            /// `torch.log`.
            fn aclnnLog(self_: In, out: Out) = element::real(f64::ln);
            /// `Tensor.log_`.
            fn aclnnInplaceLog(selfRef: InOut) = |own| element::real(f64::ln)(own, own);
            /// `torch.sqrt`.
            fn aclnnSqrt(self_: In, out: Out) = element::real(f64::sqrt);
            /// `torch.rsqrt`: norms.
            fn aclnnRsqrt(self_: In, out: Out) = element::real(|value| 1.0 / value.sqrt());
            /// `torch.reciprocal`, `1 / a`.
            fn aclnnReciprocal(self_: In, out: Out) = element::real(f64::recip);
            /// `torch.sin`: rotary positions.
            fn aclnnSin(self_: In, out: Out) = element::real(f64::sin);
            /// `torch.cos`: rotary positions.
            fn aclnnCos(input: In, out: Out) = element::real(f64::cos);
            /// `torch.sigmoid`.
            fn aclnnSigmoid(self_: In, out: Out) = element::real(|value| 1.0 / (1.0 + (-value).exp()));
            /// `torch.nn.functional.silu`.
            fn aclnnSilu(self_: In, out: Out) = element::real(element::silu);
            /// `torch.nn.functional.relu`.
            fn aclnnRelu(self_: In, out: Out) = element::unary(|value| value.max(0), element::relu);
            /// `Tensor.relu_`.
            fn aclnnInplaceRelu(selfRef: InOut) =
                |own| element::unary(|value| value.max(0), element::relu)(own, own);
            /// `torch.nn.functional.gelu` on Atlas A2 and A3, approximated with tanh whatever is asked for.
            fn aclnnGelu(self_: In, out: Out) = element::real(element::gelu_tanh);
            /// `torch_npu.npu_gelu`, and `torch.nn.functional.gelu` on Ascend 950.
            fn aclnnGeluV2(x: In, approximate: i64, y: Out) = element::gelu;
            /// `torch.tanh`.
            fn aclnnTanh(self_: In, out: Out) = element::real(f64::tanh);
            /// `-a`.
            fn aclnnNeg(self_: In, out: Out) = element::unary(i64::wrapping_neg, |value| -value);
            /// `torch.abs`, `torch.isinf`; printing a tensor.
            fn aclnnAbs(self_: In, out: Out) = element::unary(i64::wrapping_abs, f64::abs);
            /// `torch.sign`.
            fn aclnnSign(self_: In, result: Out) = element::unary(i64::signum, element::sign);
            /// `torch.floor`.
            fn aclnnFloor(self_: In, out: Out) = element::unary(|value| value, f64::floor);
            /// `torch.ceil`; printing a tensor.
            fn aclnnCeil(self_: In, out: Out) = element::unary(|value| value, f64::ceil);
            /// `torch.round`.
            fn aclnnRound(self_: In, out: Out) = element::unary(|value| value, f64::round_ties_even);
            /// `torch.trunc`.
            fn aclnnTrunc(self_: In, out: Out) = element::unary(|value| value, f64::trunc);
            /// `Tensor.sqrt_`.
            fn aclnnInplaceSqrt(self_: InOut) = |own| element::real(f64::sqrt)(own, own);
            /// `Tensor.rsqrt_`.
            fn aclnnInplaceRsqrt(selfRef: InOut) =
                |own| element::real(|value| 1.0 / value.sqrt())(own, own);
            /// `Tensor.reciprocal_`.
            fn aclnnInplaceReciprocal(selfRef: InOut) = |own| element::real(f64::recip)(own, own);
            /// `Tensor.sigmoid_`.
            fn aclnnInplaceSigmoid(selfRef: InOut) =
                |own| element::real(|value| 1.0 / (1.0 + (-value).exp()))(own, own);
            /// `Tensor.floor_`.
            fn aclnnInplaceFloor(selfRef: InOut) = |own| element::unary(|value| value, f64::floor)(own, own);
            /// `Tensor.ceil_`.
            fn aclnnInplaceCeil(selfRef: InOut) = |own| element::unary(|value| value, f64::ceil)(own, own);

            // Lines of elements.
            /// `torch.sum`.
            fn aclnnReduceSum(self_: In, dims: Ints, keepDims: Flag, dtype: Type, out: Out) =
                reduce::over_as(reduce::SUM);
            /// `torch.mean`.
            fn aclnnMean(self_: In, dim: Ints, keepDim: Flag, dtype: Type, out: Out) =
                reduce::over_as(reduce::MEAN);
            /// `torch.prod`.
            fn aclnnProd(self_: In, dtype: Type, out: Out) = reduce::whole_as(reduce::PRODUCT);
            /// `torch.prod` along an axis.
            fn aclnnProdDim(self_: In, dim: i64, keepDim: Flag, dtype: Type, out: Out) =
                reduce::along_as(reduce::PRODUCT);
            /// `torch.max` of all elements; printing a tensor.
            fn aclnnMax(self_: In, out: Out) = reduce::whole(reduce::MAX);
            /// `torch.min` of all elements; printing a tensor.
            fn aclnnMin(self_: In, out: Out) = reduce::whole(reduce::MIN);
            /// `torch.amax`.
            fn aclnnAmax(self_: In, dim: Ints, keepDim: Flag, out: Out) = reduce::over(reduce::MAX);
            /// `torch.amin`.
            fn aclnnAmin(self_: In, dim: Ints, keepDim: Flag, out: Out) = reduce::over(reduce::MIN);
            /// `torch.max` along an axis.
            fn aclnnMaxDim(self_: In, dim: i64, keepdim: Flag, out: Out, indices: Out) =
                search::extreme_along(true);
            /// `torch.min` along an axis.
            fn aclnnMinDim(self_: In, dim: i64, keepdim: Flag, out: Out, indices: Out) =
                search::extreme_along(false);
            /// `torch.argmax`.
            fn aclnnArgMax(self_: In, dim: i64, keepdim: Flag, out: Out) = search::extreme_place(true);
            /// `torch.argmin`.
            fn aclnnArgMin(self_: In, dim: i64, keepdim: Flag, out: Out) = search::extreme_place(false);
            /// `torch.any`.
            fn aclnnAny(self_: In, dim: Ints, keepdim: Flag, out: Out) = reduce::over(reduce::ANY);
            /// `torch.all`, `torch.allclose`.
            fn aclnnAll(self_: In, dim: Ints, keepdim: Flag, out: Out) = reduce::over(reduce::ALL);
            /// `torch.var`.
            fn aclnnVarCorrection(self_: In, dim: Ints, correction: i64, keepdim: Flag, out: Out) =
                reduce::variance(false);
            /// `torch.std`.
            fn aclnnStd(self_: In, dim: Ints, correction: i64, keepdim: Flag, out: Out) = reduce::variance(true);
            /// `torch.norm`, `torch.linalg.vector_norm`.
            fn aclnnLinalgVectorNorm(
                self_: In, ord: Scalar, dims: Ints, keepDims: Flag, dtype: Type, out: Out
            ) = reduce::norm;
            /// `torch.logsumexp`.
            fn aclnnLogSumExp(self_: In, dim: Ints, keepDim: Flag, out: Out) =
                reduce::log_sum_exp;
            /// `torch.softmax`.
            fn aclnnSoftmax(self_: In, dim: i64, out: Out) = reduce::softmax;
            /// `torch.log_softmax`.
            fn aclnnLogSoftmax(self_: In, dim: i64, out: Out) = reduce::log_softmax;
            /// `torch.cumsum`: cumulative lengths.
            fn aclnnCumsum(self_: In, dim: i64, dtype: Type, out: Out) = reduce::cumulate;
            /// `torch.sort`, `torch.argsort`.
            fn aclnnSort(self_: In, stable: Flag, dim: i64, descending: Flag, valuesOut: Out, indicesOut: Out) =
                search::sort;
            /// ggml's orders of rows.
            fn aclnnArgsort(self_: In, dim: i64, descending: Flag, out: Out) = search::order;
            /// `torch.topk`.
            fn aclnnTopk(
                self_: In, k: i64, dim: i64, largest: Flag, sorted: Flag, valuesOut: Out, indicesOut: Out
            ) = search::top;

            // Of models.
            /// `torch.nn.functional.layer_norm`.
            fn aclnnLayerNorm(
                input: In, normalizedShape: Ints, weightOptional: OptionalIn, biasOptional: OptionalIn, eps: f64,
                out: Out,
                meanOutOptional: OptionalOut, rstdOutOptional: OptionalOut
            ) = model::layer_norm;
            /// `torch_npu.npu_add_rms_norm`: vLLM-Ascend, SGLang.
            fn aclnnAddRmsNorm(x1: In, x2: In, gamma: In, epsilon: f64, yOut: Out, rstdOut: Out, xOut: Out) =
                model::add_rms_norm;
            /// `torch_npu.npu_swiglu`: vLLM-Ascend, SGLang.
            fn aclnnSwiGlu(x: In, dim: i64, out: Out) = gate::swiglu;
            /// `torch_npu.npu_geglu`.
            fn aclnnGeGluV3(self_: In, dim: i64, approximate: i64, activateLeft: Flag, out: Out, outGelu: Out) =
                gate::geglu;
            /// `torch_npu.npu_rotary_mul`: vLLM-Ascend.
            fn aclnnRotaryPositionEmbedding(x: In, cos: In, sin: In, mode: i64, out: Out) = rotary::rotate_by_mode;
            /// `torch_npu.npu_interleave_rope`: vLLM-Ascend, of latent queries and keys.
            fn aclnnInterleaveRope(x: In, cos: In, sin: In, out: Out) =
                rotary::rotate(rotary::Rotation::NeighboursApart);
            /// `torch_npu.npu_apply_rotary_pos_emb` of releases before the second version.
            fn aclnnApplyRotaryPosEmb(queryRef: InOut, keyRef: InOut, cos: In, sin: In, layout: i64) =
                |query, key, cos, sin, layout| rotary::rotate_in_place(query, key, cos, sin, layout, None);
            /// `torch_npu.npu_apply_rotary_pos_emb`: vLLM-Ascend, SGLang.
            fn aclnnApplyRotaryPosEmbV2(
                queryRef: InOut, keyRef: InOut, cos: In, sin: In, layout: i64, rotaryMode: Text
            ) = rotary::rotate_in_place;
            /// `torch_npu.npu_mrope`: vLLM-Ascend.
            fn aclnnRopeWithSinCosCache(
                positions: In, queryIn: In, keyIn: In, cosSinCache: In, mropeSection: Ints, headSize: i64,
                isNeoxStyle: Flag, queryOut: Out, keyOut: Out
            ) = rotary::rotate_by_table;
            /// `torch_npu.npu_kv_rmsnorm_rope_cache`: vLLM-Ascend, latent keys and values.
            fn aclnnKvRmsNormRopeCache(
                kv: In, gamma: In, cos: In, sin: In, index: In, kCacheRef: InOut, ckvCacheRef: InOut,
                kRopeScaleOptional: OptionalIn, ckvScaleOptional: OptionalIn, kRopeOffsetOptional: OptionalIn,
                cKvOffsetOptional: OptionalIn, epsilon: f64, cacheModeOptional: Text, isOutputKv: Flag, kRopeOut: Out,
                cKvOut: Out
            ) = latent::normalise_rotate_and_cache;
            /// `torch_npu.npu_dynamic_quant`: vLLM-Ascend, of latent queries.
            fn aclnnDynamicQuant(x: In, smoothScales: OptionalIn, yOut: Out, scaleOut: Out) =
                model::quantise_lines;
            /// `torch_npu.npu_scatter_nd_update_`: vLLM-Ascend, into caches of its indexer.
            fn aclnnScatterNdUpdate(varRef: InOut, indices: In, updates: In) = model::update_parts;

            // Products.
            /// `torch.matmul`, `a @ b`.
            fn aclnnMatmul(self_: In, mat2: In, out: Out, cubeMathType: i8) = matmul::matmul;
            /// `torch.mm`.
            fn aclnnMm(self_: In, mat2: In, out: Out, cubeMathType: i8) = matmul::ranked(2);
            /// `torch_npu.npu_transpose_batchmatmul`: vLLM-Ascend, of latent values.
            fn aclnnTransposeBatchMatMul(
                x1: In, x2: In, bias: OptionalIn, scale: OptionalIn, permX1: Ints, permX2: Ints, permY: Ints,
                cubeMathType: i8, batchSplitFactor: i32, out: Out
            ) = matmul::transposed_batches;
            /// `torch_npu.npu_weight_quant_batchmatmul`, ggml's products of quantised weights.
            fn aclnnWeightQuantBatchMatmulV2(
                x: In, weight: InPacked, antiquantScale: In, antiquantOffsetOptional: OptionalIn,
                quantScaleOptional: OptionalIn, quantOffsetOptional: OptionalIn, biasOptional: OptionalIn,
                antiquantGroupSize: i32, y: Out
            ) = quantised::multiply_dequantised;
            /// `torch.dot`.
            fn aclnnDot(self_: In, tensor: In, out: Out) = |a, b, out| matmul::ranked(1)(a, b, out, 0);
            /// `torch.mv`.
            fn aclnnMv(self_: In, vec: In, out: Out, cubeMathType: i8) = matmul::matmul;
            /// `torch.nn.functional.linear` with a bias, `torch.addmm`.
            fn aclnnAddmm(
                self_: In, mat1: In, mat2: In, beta: Scalar, alpha: Scalar, out: Out, cubeMathType: i8
            ) = matmul::add_product;
            /// `torch.baddbmm`.
            fn aclnnBaddbmm(
                self_: In, batch1: In, batch2: In, beta: Scalar, alpha: Scalar, out: Out, cubeMathType: i8
            ) = matmul::add_product;
        }
    };
}
