//! The rules of NsaCompress.

use super::{NsaCompressCall, NsaCompressProblem, Parameter, Version};
use crate::DType::{Bf16, Float16};
use crate::allowed::{Axis, Named, Outcome, Shapes};
use crate::contract::first_lint;
use crate::ops::native_sparse::{Compression, compression_rules};
use crate::rule::rules;
use crate::{Change, Target, TensorDesc, Violation};

compression_rules! {
    "nsa_compress", "NsaCompress",
    required PARAM_NULLPTR "input, weight, actSeqLen, layout and output"
        "tokens, weights, the ends of sequences and the output",
    lengths "0: running sums", heads "1 to 128";
    INPUT = "nsa_compress.input", PARAM_INVALID, V1, "NsaCompress documentation, input",
        "input is [T, N, D] with heads and elements",
        "give the tokens of all sequences one after the other";
    OUT = "nsa_compress.out", INNER_NULLPTR, V1, "NsaCompress documentation, output",
        "output has three axes, with the heads and elements of input",
        "give room for a token of each block";
    LENGTHS = "nsa_compress.lengths", Overrun("tokens of other memory are read"), V1,
        "NsaCompress documentation, actSeqLen",
        "actSeqLen has ends that ascend from 0 or more, the last of them no larger than the tokens of input",
        "give a running sum of the lengths of sequences";
    OUT_ROWS = "nsa_compress.out_rows", Overrun("a token is written for each block, whatever room there is"), V1,
        "NsaCompress documentation, output",
        "output has as many tokens as there are blocks in sequences",
        "give (length - compressBlockSize) / compressStride + 1 tokens for each sequence that has a block";
}

impl NsaCompressCall<'_> {
    /// Checks the call against the contract of the operator on `target`, and resolves it.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<NsaCompressProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let input = REQUIRED.requires(self.input, "input")?;
        let weight = REQUIRED.requires(self.weight, "weight")?;
        REQUIRED.requires(self.act_seq_len, "actSeqLen")?;
        let output = REQUIRED.requires(self.output, "output")?;
        DTYPE.takes(Named("input", input.dtype), [Float16, Bf16])?;
        DTYPE.dtypes(self, |_| Some(input.dtype))?;
        FORMAT.formats(self)?;
        LAYOUT.takes(self.layout, "TND").fix(|| Change::set(Parameter::Layout, "TND"))?;
        INPUT.takes(input.shape, Shapes(&[&[Axis::Any, Axis::From(1), Axis::From(1)]]))?;
        let &[tokens, heads, dim] = &input.shape[..] else {
            return Err(INPUT.broken(input.shape, "three axes"));
        };
        COMPRESSION.weight(&weight, self.compress_block_size, heads)?;
        LENGTH_TYPE.takes(self.act_seq_len_type, 0).fix(|| Change::set(Parameter::ActSeqLenType, 0))?;
        let sizes = [self.compress_block_size, self.compress_stride];
        let compression = COMPRESSION.resolve(sizes, [heads, dim], 1..=128)?;
        OUT.takes(output.shape, Shapes(&[&[Axis::Any, Axis::Of(heads), Axis::Of(dim)]]))?;
        Ok(self.problem(compression, [tokens, heads, dim], &output))
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let (Ok(problem), Some(output)) = (self.check(target), self.output) else {
            return Ok(());
        };
        let tokens = i64::try_from(problem.tokens).unwrap_or(i64::MAX);
        first_lint(allowed, |report| {
            let mut before = 0;
            for &end in self.act_seq_len.unwrap_or_default() {
                if let Err(violation) = LENGTHS.takes(end, before..=tokens) {
                    report(violation);
                    break;
                }
                before = end;
            }
            let blocks = i64::try_from(problem.blocks).unwrap_or(i64::MAX);
            OUT_ROWS.takes(Named("tokens of output:", output.shape[0]), blocks).report(report);
        })
    }

    fn problem(&self, compression: Compression, sizes: [i64; 3], output: &TensorDesc) -> NsaCompressProblem {
        // The input is one that memory can hold.
        let [tokens, heads, dim] = sizes.map(|size| usize::try_from(size).unwrap_or(0));
        let blocks = self.blocks(&compression, tokens);
        let overruns = i64::try_from(blocks).map_or(true, |blocks| blocks > output.shape[0]);
        NsaCompressProblem { compression, tokens, blocks, heads, dim, overruns }
    }
}
