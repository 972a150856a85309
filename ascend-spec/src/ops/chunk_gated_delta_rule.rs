//! ChunkGatedDeltaRule: linear attention of prompts, each sequence with a state of its own.
//!
//! The computation is that of the [gated delta rule](super::delta_rule). The kernel computes chunks of 64 tokens by
//! products of matrices, with every intermediate result rounded to BF16.

use super::delta_rule::{DeltaRuleContents, DeltaRuleProblem, ShapeRules};
use crate::Cann::{V9_1, V9_2};
use crate::DType::{Bf16, Float, Int32};
use crate::allowed::{Checked, Named};
use crate::attention_problem::lint_scale;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by, first_lint};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::rule::rules;
use crate::{DType, Dims, Target, TensorDesc, Violation};

declare_operator! {
    /// Source: aclnnChunkGatedDeltaRule, parameter table.
    chunk_gated_delta_rule_arguments, "ChunkGatedDeltaRule", #[derive(Copy)] ChunkDeltaCall;
    1 { query: tensor, Query, "query", "Queries, `[T, Nk, Dk]`." }
    1 { key: tensor, Key, "key", "Keys, `[T, Nk, Dk]`." }
    1 { value: tensor, Value, "value", "Values, `[T, Nv, Dv]`." }
    1 { beta: tensor, Beta, "beta", "The part of each correction that is made, `[T, Nv]`." }
    1 { initial_state: tensor, InitialState, "initialState",
        "The state that each sequence begins with, `[B, Nv, Dv, Dk]`: zeros for one that begins empty." }
    1 { actual_seq_lengths: tensor, ActualSeqLengths, "actualSeqLengths",
        "Tokens of each sequence, `[B]`: lengths, not ends." }
    1 { g: tensor, G, "gOptional", "Logarithm of the decay of each head, `[T, Nv]`; null is no decay." }
    1 { scale: float32 = 1.0, Scale, "scaleValue", "Factor of the queries." }
    1 { out: output, Out, "out", "Outputs, `[T, Nv, Dv]`." }
    1 { final_state: output, FinalState, "finalState",
        "The state behind the last token of each sequence, `[B, Nv, Dv, Dk]`. That of a sequence without \
         tokens is not written." }
}

versions! {
    /// The version of ChunkGatedDeltaRule.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnChunkGatedDeltaRule", "9.1")
            .exported_since(V9_1).on_a2_a3(V9_1).on_ascend950(V9_2),
    }
}

/// The rules of ChunkGatedDeltaRule.
pub mod rules {
    use super::*;

    rules! {
        in Scope::ALL.since(V9_1).since_on_950(V9_2);
        PRODUCT = "chunk_delta.product", FIND_KERNEL_ERROR, V1, "ChunkGatedDeltaRule documentation, products"
            in Scope::ALL,
            "the product has the operator in the release",
            "run on Atlas A2 or Atlas A3 with CANN 9.1 or newer, or on Ascend 950 with CANN 9.2";
        REQUIRED = "chunk_delta.required", PARAM_INVALID, V1, "ChunkGatedDeltaRule API, null pointers",
            "query, key, value, beta, initialState, actualSeqLengths, out and finalState are given",
            "pass all tensors but g: zeros as initialState of sequences that begin";
        DTYPE = "chunk_delta.dtype", PARAM_INVALID, V1, "ChunkGatedDeltaRule API, dtypes",
            "query, key, value, beta and out are BF16, initialState and finalState both BF16 or on Ascend 950 both "
            "FLOAT, g FLOAT and lengths INT32",
            "convert the named tensor to one of the allowed dtypes";
        format of "chunk_delta", INNER_NULLPTR, "ChunkGatedDeltaRule infer-shape, formats";
        RANK = "chunk_delta.rank", INNER_NULLPTR, V1, "ChunkGatedDeltaRule tiling, ranks",
            "query, key, value and out have 3 axes, beta and g 2, states 4, lengths 1",
            "describe the tensor with as many axes";
        HEADS = "chunk_delta.heads", INNER_NULLPTR, V1, "ChunkGatedDeltaRule tiling, heads",
            "there are 1 to 64 key heads, and value heads up to 64, a multiple of them",
            "give each key head as many value heads; divide more heads over calls, such that those of a key head stay \
             together";
        DIMS = "chunk_delta.dims", INNER_NULLPTR, V1, "ChunkGatedDeltaRule tiling, head dimensions",
            "heads of keys and of values have 1 to 128 elements",
            "use the operator for heads of this size alone";
        SHAPE = "chunk_delta.shape", INNER_NULLPTR, V1, "ChunkGatedDeltaRule tiling, shapes",
            "key has the shape of query, out that of value, beta and g a number for each token and head, and both "
            "states [B, Nv, Dv, Dk]",
            "give tensors of the same tokens, sequences and heads; a state has a row for each element of a value";
        EMPTY = "chunk_delta.empty", INNER_NULLPTR, V1, "ChunkGatedDeltaRule tiling, sizes",
            "there are tokens and sequences",
            "leave the call out where there is nothing to compute";
        ROWS_LEFT_OUT = "chunk_delta.rows_left_out", Lint("such rows of the output keep what was there"), V1,
            "ChunkGatedDeltaRule kernel, lengths",
            "the tokens all belong to a sequence",
            "give the length of each sequence, not its end, or tensors of the sequences' tokens alone";
        NO_TOKENS = "chunk_delta.no_tokens", Lint("its state is not written"), V1,
            "ChunkGatedDeltaRule kernel, lengths",
            "each sequence has a token",
            "leave sequences without tokens out of the call, and keep their states";
        CONTENTS = "chunk_delta.contents", Overrun("rows of other memory are read or written"), V1,
            "ChunkGatedDeltaRule kernel, lengths",
            "lengths are at least 0, and together no more than the tokens",
            "make lengths and tensors from one batch, with the length of each sequence and not its end";
        scale of "chunk_delta", "ChunkGatedDeltaRule", "queries", "usually one over the root of the elements of a key",
            "the number of elements of a key", "the elements of a key: with 0 every output is 0";
    }
}

use rules::*;

const SHAPES: ShapeRules = ShapeRules { rank: &RANK, heads: &HEADS, dims: &DIMS, shape: &SHAPE, most: [64, 128] };

described_by! { ChunkGatedDeltaRule, RULES }

impl CallContract for ChunkGatedDeltaRule {
    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        let [out, state] = arguments.call().outputs();
        arguments.out = arguments.out.or(out);
        arguments.final_state = arguments.final_state.or(state);
    }

    contents_checked_for! { target, |_, problem, integers| {
        let lengths = integers(Parameter::ActualSeqLengths);
        problem.checked_contents(DeltaRuleContents { lengths: &lengths, ..DeltaRuleContents::default() }, &CONTENTS)
    } }
}

impl ChunkDeltaCall {
    /// The output and the states behind the last tokens, as values and initial states imply them.
    pub fn outputs(&self) -> [Option<TensorDesc>; 2] {
        let packed = |dtype: DType, desc: Option<TensorDesc>| Some(TensorDesc::packed(dtype, desc?.shape));
        let state = self.initial_state.map_or(Bf16, |state| state.dtype);
        [packed(Bf16, self.value), packed(state, self.initial_state)]
    }

    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of the lengths
    /// are not checked.
    ///
    /// Allocates nothing unless it refuses. Where both outputs are empty the operator looks at nothing but dtypes, and
    /// computes nothing.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<DeltaRuleProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let query = REQUIRED.requires(self.query, "query")?;
        REQUIRED.requires(self.key, "key")?;
        let value = REQUIRED.requires(self.value, "value")?;
        REQUIRED.requires(self.beta, "beta")?;
        let initial_state = REQUIRED.requires(self.initial_state, "initialState")?;
        let lengths = REQUIRED.requires(self.actual_seq_lengths, "actualSeqLengths")?;
        let out = REQUIRED.requires(self.out, "out")?;
        let final_state = REQUIRED.requires(self.final_state, "finalState")?;
        self.dtypes(&initial_state, target)?;
        if out.is_empty() && final_state.is_empty() {
            return Ok(DeltaRuleProblem::none());
        }
        FORMAT.formats(self)?;
        let sizes = SHAPES.sizes(&query, &value)?;
        let [tokens, heads] = [sizes.tokens, sizes.value_heads];
        let sequences = lengths.shape.first().copied().unwrap_or(0);
        let states = [sequences, heads, sizes.value_dim, sizes.key_dim];
        SHAPES.is("key", self.key.as_ref(), &query.shape)?;
        SHAPES.is("value", Some(&value), &[tokens, heads, sizes.value_dim])?;
        SHAPES.is("beta", self.beta.as_ref(), &[tokens, heads])?;
        SHAPES.is("actualSeqLengths", Some(&lengths), &[sequences])?;
        SHAPES.is("initialState", Some(&initial_state), &states)?;
        SHAPES.is("g", self.g.as_ref(), &[tokens, heads])?;
        SHAPES.is("out", Some(&out), &value.shape)?;
        SHAPES.is("finalState", Some(&final_state), &states)?;
        for (name, count) in [("tokens", tokens), ("sequences", sequences)] {
            EMPTY.takes(Named(name, count), 1..)?;
        }
        let count = |size: i64| usize::try_from(size).unwrap_or(0);
        Ok(DeltaRuleProblem {
            sequences: count(sequences),
            tokens: count(tokens),
            key_heads: count(sizes.key_heads),
            value_heads: count(heads),
            key_dim: count(sizes.key_dim),
            value_dim: count(sizes.value_dim),
            scale: self.scale as f32,
            ..DeltaRuleProblem::none()
        })
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let Some(problem) = self.check(target).ok().filter(|problem| !problem.is_idle()) else {
            return Ok(());
        };
        first_lint(allowed, |report| {
            lint_scale(self.scale, [problem.key_dim, 0], [&SCALE, &SCALE_ZERO, &SCALE_INVERSE], report);
        })
    }

    fn dtypes(&self, initial_state: &TensorDesc, target: Target) -> Checked {
        let states: &[DType] = if target.is_950() { &[Bf16, Float] } else { &[Bf16] };
        DTYPE.takes(Named("initialState", initial_state.dtype), states)?;
        DTYPE.dtypes(self, |parameter| {
            Some(match parameter {
                Parameter::InitialState | Parameter::FinalState => initial_state.dtype,
                Parameter::G => Float,
                Parameter::ActualSeqLengths => Int32,
                _ => Bf16,
            })
        })
    }
}

impl WalkedTensors<ChunkDeltaCall> for DeltaRuleProblem {
    fn walked_shape(&self, _: &ChunkDeltaCall, _: Parameter, desc: &TensorDesc) -> Option<Dims> {
        (!self.is_idle()).then_some(desc.shape)
    }
}
