//! NsaCompress: one token of each block of tokens, for native sparse attention.
//!
//! [`NsaCompress`] describes a call, which is planned once and launched per layer as an [`NsaCompressPlan`].

use ascend_spec::nsa_compress_arguments;
use ascend_spec::ops::nsa_compress::{NsaCompressCall, Parameter, Version};

use crate::error::{Error, Result};
use crate::memory::Element;
use crate::operator::{AllowedLints, EntryPoints, NamedTensors, entry_points, lints_of, phase_one};
use crate::ops::operation::{self, PlainCall, PlainOperation, Sealed};
use crate::tensor::{AnyTensor, Tensor};

entry_points! {
    nsa_compress_arguments, NsaCompressCall<'_>, AnyArguments::NsaCompress;
    Version::V1 => 1: aclnnNsaCompressGetWorkspaceSize, aclnnNsaCompress;
}

/// What to do where the installed CANN has no such operator.
const INSTEAD: &str = "multiply blocks and their weights with BatchMatMul, or attend to all tokens";

/// A call of NsaCompress: of each block of tokens of a sequence it makes one token, the sum of the block's tokens, each
/// times its weight for the head.
///
/// Describe it, plan it for tensors of certain shapes, and launch the [`NsaCompressPlan`] once a layer, for keys and
/// for values.
///
/// Source: aclnnNsaCompress, since CANN 8.5, on Atlas A2 and A3; elsewhere planning is an
/// [`Error::MissingOperator`](crate::Error::MissingOperator) or an [`Error::Violation`](crate::Error::Violation).
///
/// ```
/// use ascend_attention::nsa_compress::NsaCompress;
/// use ascend_attention::{Runtime, f16};
///
/// # fn main() -> ascend_attention::Result<()> {
/// # #[cfg(feature = "emulation")] {
/// let stream = Runtime::emulated()?.device(0)?.stream()?;
/// // 48 tokens with a head of 16 numbers, of which the first half are 1 and the others 3.
/// let tokens: Vec<f16> = (0..48).flat_map(|token| [f16::from_f32(if token < 24 { 1.0 } else { 3.0 }); 16]).collect();
/// let tokens = stream.upload(&tokens, [48, 1, 16])?;
/// // Blocks of 32 tokens, which weigh alike, one from every 16th token on.
/// let weights = stream.upload(&[f16::from_f32(1.0 / 32.0); 32], [32, 1])?;
/// let plan = NsaCompress::new(32, 16).plan(&[48], (&tokens, &weights))?;
/// let compressed = plan.launch(&stream, (&tokens, &weights))?;
/// assert_eq!(compressed.shape(), [2, 1, 16]);
/// let means = compressed.download(&stream)?;
/// assert_eq!([means[0], means[16]].map(f16::to_f32), [1.5, 2.5]);
/// # }
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
#[must_use = "a description does nothing until planned"]
pub struct NsaCompress {
    block: i64,
    stride: i64,
    allowed: AllowedLints,
}

impl NsaCompress {
    /// A call that compresses blocks of `block` tokens, of which one begins every `stride` tokens of a sequence.
    pub fn new(block: usize, stride: usize) -> Self {
        let [block, stride] = [block, stride].map(|size| i64::try_from(size).unwrap_or(i64::MAX));
        Self { block, stride, allowed: AllowedLints::default() }
    }

    /// Lets a call through that breaks this lint, which stays within the call's tensors.
    pub fn allow_lint(mut self, id: &str) -> Self {
        self.allowed.lint(id);
        self
    }

    /// Checks a call with tokens `[T, N, D]` of sequences of these lengths, one after the other, and weights
    /// `[block, N]`, and prepares it for tensors of these shapes and strides. Nothing is launched, and the tensors are
    /// not kept.
    ///
    /// # Errors
    /// Before any function of the operator is called: [`Error::Violation`](crate::Error::Violation), by
    /// `nsa_compress.lengths` for lengths that are more than the tokens;
    /// [`ARGUMENT_VALUE`](crate::rules::ARGUMENT_VALUE) for tokens of other axes;
    /// [`Error::UnknownProduct`](crate::Error::UnknownProduct),
    /// [`Error::MissingOperator`](crate::Error::MissingOperator),
    /// [`ARGUMENT_DEVICE`](crate::rules::ARGUMENT_DEVICE) for tensors of different devices. After that
    /// [`Error::Aclnn`](crate::Error::Aclnn), should the operator refuse the call nevertheless.
    #[doc(alias = "aclnnNsaCompressGetWorkspaceSize")]
    pub fn plan<T: Element>(&self, lengths: &[usize], inputs: (&Tensor<T>, &Tensor<T>)) -> Result<NsaCompressPlan> {
        let (input, _) = inputs;
        let context = input.memory().context();
        let tensors: NamedTensors<'_, _> = Self::tensors(&(), &inputs).collect();
        NsaCompressCall::check_device(Version::V1, context, INSTEAD, tensors.iter().copied())?;
        let mut end = 0i64;
        let ends = lengths.iter().map(|&length| {
            end = end.saturating_add(i64::try_from(length).unwrap_or(i64::MAX));
            end
        });
        let ends: Vec<i64> = ends.collect();
        let mut call = NsaCompressCall {
            act_seq_len: Some(&ends),
            compress_block_size: self.block,
            compress_stride: self.stride,
            ..NsaCompressCall::default()
        };
        call.describe(&tensors);
        call.output = call.compressed();
        NsaCompressPlan::of_call((&call, Version::V1), input, &tensors, || {
            let target = context.target()?;
            if call.output.is_none() {
                let given = format_args!("{} in blocks of {} every {}", input.desc(), self.block, self.stride);
                let allowed = "[T, N, D] in blocks of at least one token, which memory can hold compressed";
                return Err(
                    Error::invalid("input", given, allowed).fix("give the tokens these axes, and blocks their size")
                );
            }
            let problem = call.check(target)?;
            call.lint(target, &self.allowed.ids(lints_of::<Version>)?)?;
            Ok((PlainOperation::new((), []), problem.is_idle()))
        })
    }
}

/// A call of NsaCompress that was checked and prepared. From [`NsaCompress::plan`].
///
/// A launch reads the pair of tokens and weights, and writes the compressed tokens of all sequences, one after the
/// other, `[blocks, N, D]`: none where no sequence has a block.
pub type NsaCompressPlan = operation::Plan<PlainOperation<NsaCompress>>;

impl Sealed for NsaCompress {}

impl PlainCall for NsaCompress {
    type Inputs<'a, T: Element> = (&'a Tensor<T>, &'a Tensor<T>);
    type Output<T: Element> = Tensor<T>;
    type Parameter = Parameter;
    type Kept = ();
    const OUTPUTS: &'static [Parameter] = &[Parameter::Output];

    fn tensors<'t, 'i: 't, T: Element>(
        (): &'t (),
        (input, weight): &'t (&'i Tensor<T>, &'i Tensor<T>),
    ) -> impl Iterator<Item = (Parameter, &'t AnyTensor)> {
        let inputs: [(_, &AnyTensor); 2] = [(Parameter::Input, input), (Parameter::Weight, weight)];
        inputs.into_iter()
    }
}
