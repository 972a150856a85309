//! RecurrentGatedDeltaRule: linear attention of few tokens a sequence over a pool of states, which decoding and the
//! verification of drafts need.
//!
//! After each token its state is written to a slot of its own. A step that goes on behind drafts begins at the slot of
//! the last accepted one, so that the others are taken back by not being named again. The computation is that of the
//! [gated delta rule](super::delta_rule).

use super::delta_rule::{DeltaRuleContents, DeltaRuleProblem, ShapeRules};
use crate::Cann::{V8_5, V9_1, V9_2};
use crate::DType::{Bf16, Float, Int32};
use crate::allowed::{Checked, Named, Noted, Outcome, Rank};
use crate::attention_problem::lint_scale;
use crate::contract::{CallContract, checked_for, contents_checked_for, described_by, first_lint};
use crate::operator::{OperatorVersion, WalkedTensors, versions};
use crate::rule::{lint, rules};
use crate::{DType, Dims, Target, TensorDesc, Violation};

declare_operator! {
    /// Source: aclnnRecurrentGatedDeltaRule, parameter table.
    recurrent_gated_delta_rule_arguments, "RecurrentGatedDeltaRule", #[derive(Copy)] RecurrentDeltaCall;
    1 { query: tensor, Query, "query", "Queries, `[T, Nk, Dk]`." }
    1 { key: tensor, Key, "key", "Keys, `[T, Nk, Dk]`." }
    1 { value: tensor, Value, "value", "Values, `[T, Nv, Dv]`." }
    1 { beta: tensor, Beta, "beta", "The part of each correction that is made, `[T, Nv]`." }
    1 { state: inout, State, "stateRef", "The pool of states, `[slots, Nv, Dv, Dk]`." }
    1 { actual_seq_lengths: tensor, ActualSeqLengths, "actualSeqLengths",
        "Tokens of each sequence, `[B]`: lengths, not ends, at most 8 each." }
    1 { ssm_state_indices: tensor, SsmStateIndices, "ssmStateIndices",
        "The slot that each token's state is written to, `[T]`." }
    1 { g: tensor, G, "g", "Logarithm of the decay of each head, `[T, Nv]`; null is no decay." }
    1 { gk: tensor, Gk, "gk",
        "Logarithm of the decay of each column of a state, `[T, Nv, Dk]`; null is no decay. From 9.0 on." }
    1 { num_accepted_tokens: tensor, NumAcceptedTokens, "numAcceptedTokens",
        "Accepted tokens of each sequence's step before, `[B]`, of which the first counts: it goes on from the \
         slot that its token of this number names now. Null is 1." }
    1 { scale: float32 = 1.0, Scale, "scaleValue", "Factor of the queries." }
    1 { out: output, Out, "out", "Outputs, `[T, Nv, Dv]`." }
}

versions! {
    /// The version of RecurrentGatedDeltaRule.
    pub enum Version {
        /// The only one.
        V1 = OperatorVersion::new(1, "aclnnRecurrentGatedDeltaRule", "8.5")
            .exported_since(V8_5).on_a2_a3(V8_5).on_ascend950(V9_1),
    }
}

/// The rules of RecurrentGatedDeltaRule.
pub mod rules {
    use super::*;

    rules! {
        in Scope::ALL.since(V8_5).since_on_950(V9_1);
        PRODUCT = "recurrent_delta.product", FIND_KERNEL_ERROR, V1, "RecurrentGatedDeltaRule documentation, products"
            in Scope::ALL,
            "the product has the operator in the release",
            "run on Atlas A2 or Atlas A3 with CANN 8.5 or newer, or on Ascend 950 with CANN 9.1 or newer";
        REQUIRED = "recurrent_delta.required", PARAM_INVALID, V1, "RecurrentGatedDeltaRule API, null pointers",
            "query, key, value, beta, stateRef, actualSeqLengths, ssmStateIndices and out are given",
            "pass all tensors but g, gk and numAcceptedTokens";
        GK = "recurrent_delta.gk", PARAM_INVALID, V1, "RecurrentGatedDeltaRule API, gk"
            in Scope::A2_A3.since(V8_5).until(V8_5),
            "gk is null in 8.5",
            "run on CANN 9.0 or newer: a layer whose columns decay cannot be computed without gk";
        DTYPE = "recurrent_delta.dtype", PARAM_INVALID, V1, "RecurrentGatedDeltaRule API, dtypes",
            "query, key, value, beta and out are BF16, stateRef BF16 and from 9.2 on also FLOAT, g and gk FLOAT, and "
            "lengths, slots and accepted counts INT32",
            "convert the named tensor to one of the allowed dtypes";
        format of "recurrent_delta", INNER_NULLPTR, "RecurrentGatedDeltaRule infer-shape, formats";
        RANK = "recurrent_delta.rank", INNER_NULLPTR, V1, "RecurrentGatedDeltaRule tiling, ranks",
            "query, key, value and gk have 3 axes, beta and g 2, stateRef 4, lengths, slots and accepted counts 1",
            "describe the tensor with as many axes";
        HEADS = "recurrent_delta.heads", INNER_NULLPTR, V1, "RecurrentGatedDeltaRule tiling, heads",
            "there are 1 to 256 key heads, and value heads up to 256, a multiple of them",
            "give each key head as many value heads; divide more heads over calls, such that those of a key head stay \
             together";
        DIMS = "recurrent_delta.dims", INNER_NULLPTR, V1, "RecurrentGatedDeltaRule tiling, head dimensions",
            "heads of keys and of values have 1 to 512 elements",
            "use the operator for heads of this size alone";
        SHAPE = "recurrent_delta.shape", INNER_NULLPTR, V1, "RecurrentGatedDeltaRule tiling, shapes",
            "key has the shape of query, beta a number for each token and head, and stateRef states [Nv, Dv, Dk]",
            "give tensors of the same tokens and heads; a state has a row for each element of a value";
        EMPTY = "recurrent_delta.empty", INNER_NULLPTR, V1, "RecurrentGatedDeltaRule tiling, sizes",
            "there are tokens, sequences and states",
            "leave the call out where there is nothing to compute";
        POOL = "recurrent_delta.pool", INNER_NULLPTR, V1, "RecurrentGatedDeltaRule tiling, stateRef"
            in Scope::ALL.since(V9_1).since_on_950(V9_1),
            "from 9.1 on there are at least as many states as tokens",
            "give the pool more states, or compute fewer tokens in a call";
        PER_TOKEN = "recurrent_delta.per_token", INNER_NULLPTR, V1, "RecurrentGatedDeltaRule tiling, shapes"
            in Scope::ALL.since(V9_1).since_on_950(V9_1),
            "slots, g, gk, accepted counts and out have an entry for each token or sequence, and for each head",
            "give tensors of the same tokens, sequences and heads";
        ROOM = "recurrent_delta.room", Overrun("as many numbers are read and written, whatever room there is"), V1,
            "RecurrentGatedDeltaRule tiling, shapes" in Scope::A2_A3.since(V8_5).until(V9_0),
            "slots, g, gk, accepted counts and out have an entry for each token or sequence and for each head in 8.5 "
            "and 9.0 too, which do not look at them",
            "give tensors of the same tokens, sequences and heads";
        DENSE = "recurrent_delta.dense_state", Overrun("states are read and written as if nothing lay between"), V1,
            "RecurrentGatedDeltaRule kernel, stateRef",
            "stateRef is contiguous, from 9.1 on at least each of its matrices [Dv, Dk]",
            "copy a view whose axes are in another order into a contiguous pool before: what it is a view of has the "
            "states transposed; a pool with other data between its states is for CANN 9.1 or newer";
        LOST_OUT = "recurrent_delta.lost_out", Lint("the outputs are written to a copy that is dropped"), V1,
            "RecurrentGatedDeltaRule API, out" in Scope::A2_A3.since(V8_5).until(V9_0),
            "out is contiguous before 9.1",
            "pass a tensor of its own, or run on CANN 9.1 or newer";
        CONTENTS = "recurrent_delta.contents", Overrun("states of other memory are read or written"), V1,
            "RecurrentGatedDeltaRule kernel, lengths, slots and accepted counts",
            "each sequence has at most 8 tokens, all of them together no more than the queries, each token a slot of "
            "the pool, and each accepted count is that of one of the sequence's tokens",
            "make lengths and slots from one batch, with the slots of the pool; a sequence of fewer tokens than it has "
            "accepted names the slot of the last accepted one first, with a count of 1";
        SHARED = "recurrent_delta.shared_slot", Lint("a state that is read may be another than is meant"), V1,
            "RecurrentGatedDeltaRule kernel, ssmStateIndices",
            "no two sequences name one slot, nor two tokens of a sequence with several accepted tokens",
            "give each sequence slots of its own, one for each token where drafts are accepted, and copy a state that "
            "two sequences begin with";
        scale of "recurrent_delta", "RecurrentGatedDeltaRule", "queries",
            "usually one over the root of the elements of a key", "the number of elements of a key",
            "the elements of a key: with 0 every output is 0";
    }
}

use rules::*;

const SHAPES: ShapeRules = ShapeRules { rank: &RANK, heads: &HEADS, dims: &DIMS, shape: &SHAPE, most: [256, 512] };

described_by! { RecurrentGatedDeltaRule, RULES }

impl CallContract for RecurrentGatedDeltaRule {
    const KEEPS_ELEMENTS: bool = true;

    checked_for! { target }

    fn imply_outputs(arguments: &mut Self::Arguments, _: &dyn Fn(&str) -> Option<Dims>) {
        arguments.out = arguments.out.or_else(|| arguments.call().output());
    }

    contents_checked_for! { target, |_, problem, integers| {
        let [lengths, slots, accepted] = RecurrentDeltaCall::CONTENTS.map(integers);
        let contents = DeltaRuleContents { lengths: &lengths, slots: &slots, accepted: &accepted };
        problem.checked_contents(contents, &CONTENTS)
    } }
}

impl RecurrentDeltaCall {
    /// The tensors whose numbers lead to states: lengths, slots and accepted counts.
    pub const CONTENTS: [Parameter; 3] =
        [Parameter::ActualSeqLengths, Parameter::SsmStateIndices, Parameter::NumAcceptedTokens];

    /// The output, as the values imply it.
    pub fn output(&self) -> Option<TensorDesc> {
        let value = self.value?;
        Some(TensorDesc::packed(Bf16, value.shape))
    }

    /// Checks the call against the contract of the operator on `target`, and resolves it. The contents of lengths,
    /// slots and accepted counts are not checked.
    ///
    /// Allocates nothing unless it refuses.
    ///
    /// # Errors
    /// [`Violation`] by the first broken rule.
    pub fn check(&self, target: Target) -> Result<DeltaRuleProblem, Violation> {
        PRODUCT.runs(Version::V1.info(), target)?;
        let query = REQUIRED.requires(self.query, "query")?;
        let key = REQUIRED.requires(self.key, "key")?;
        let value = REQUIRED.requires(self.value, "value")?;
        let beta = REQUIRED.requires(self.beta, "beta")?;
        let state = REQUIRED.requires(self.state, "stateRef")?;
        let lengths = REQUIRED.requires(self.actual_seq_lengths, "actualSeqLengths")?;
        REQUIRED.requires(self.ssm_state_indices, "ssmStateIndices")?;
        REQUIRED.requires(self.out, "out")?;
        if GK.scope.holds(target) {
            GK.forbids([("gk", self.gk.is_some())])?;
        }
        self.dtypes(target)?;
        FORMAT.formats(self)?;
        let sizes = SHAPES.sizes(&query, &value)?;
        let [tokens, heads] = [sizes.tokens, sizes.value_heads];
        SHAPES.is("key", Some(&key), &query.shape)?;
        SHAPES.is("value", Some(&value), &[tokens, heads, sizes.value_dim])?;
        SHAPES.is("beta", Some(&beta), &[tokens, heads])?;
        let slots = state.shape.first().copied().unwrap_or(0);
        SHAPES.is("stateRef", Some(&state), &[slots, heads, sizes.value_dim, sizes.key_dim])?;
        let sequences = lengths.shape.first().copied().unwrap_or(0);
        SHAPES.is("actualSeqLengths", Some(&lengths), &[sequences])?;
        for (name, count) in [("tokens", tokens), ("sequences", sequences), ("states", slots)] {
            EMPTY.takes(Named(name, count), 1..)?;
        }
        for (parameter, desc, shape) in self.per_token(&value) {
            let name = parameter.acl_name();
            RANK.takes(Named(name, desc.shape), Rank(shape.rank()))?;
            PER_TOKEN.takes_on(target, Named(name, desc.shape), shape)?;
        }
        POOL.takes_on(target, Noted(slots, "states in the pool"), tokens..)?;
        let count = |size: i64| usize::try_from(size).unwrap_or(0);
        Ok(DeltaRuleProblem {
            sequences: count(sequences),
            tokens: count(tokens),
            key_heads: count(sizes.key_heads),
            value_heads: count(heads),
            key_dim: count(sizes.key_dim),
            value_dim: count(sizes.value_dim),
            scale: self.scale as f32,
            slots: Some(count(slots)),
            dense_state: target.cann < V9_1,
            loses_out: LOST_OUT.scope.holds(target) && self.out.is_some_and(|out| !out.is_contiguous()),
            overruns: walked_state(&state, target.cann < V9_1).strides != state.strides
                || self.per_token(&value).any(|(_, desc, shape)| desc.shape != shape),
        })
    }

    /// The first lint that the call, which holds every rule, breaks, leaving out those in `allowed` (by id).
    ///
    /// # Errors
    /// The broken lint, with the same fields as a broken rule.
    pub fn lint(&self, target: Target, allowed: &[&str]) -> Result<(), Violation> {
        let (Some(value), Some(state), Some(out)) = (self.value, self.state, self.out) else {
            return Ok(());
        };
        let Ok(problem) = self.check(target) else {
            return Ok(());
        };
        first_lint(allowed, |report| {
            lint_scale(self.scale, [problem.key_dim, 0], [&SCALE, &SCALE_ZERO, &SCALE_INVERSE], report);
            for (parameter, desc, shape) in self.per_token(&value) {
                ROOM.takes_on(target, Named(parameter.acl_name(), desc.shape), shape).report(report);
            }
            let walked = walked_state(&state, target.cann < V9_1);
            lint!(
                report,
                walked.strides == state.strides,
                DENSE,
                format_args!("stateRef {} strides {}", state.shape, state.strides),
                format_args!("strides {}", walked.strides),
            );
            if LOST_OUT.scope.holds(target) {
                let given = format_args!("out {} strides {}", out.shape, out.strides);
                lint!(report, out.is_contiguous(), LOST_OUT, given, "row-major strides");
            }
        })
    }

    /// The tensors whose shapes releases before 9.1 do not compare, and those that they have to have.
    fn per_token(&self, value: &TensorDesc) -> impl Iterator<Item = (Parameter, TensorDesc, Dims)> {
        let axis =
            |desc: Option<TensorDesc>, axis: usize| desc.and_then(|desc| desc.shape.get(axis).copied()).unwrap_or(0);
        let [tokens, heads] = [value.shape[0], value.shape[1]];
        let (sequences, key_dim) = (axis(self.actual_seq_lengths, 0), axis(self.query, 2));
        let all = [
            (Parameter::SsmStateIndices, self.ssm_state_indices, Dims::of([tokens])),
            (Parameter::G, self.g, Dims::of([tokens, heads])),
            (Parameter::Gk, self.gk, Dims::of([tokens, heads, key_dim])),
            (Parameter::NumAcceptedTokens, self.num_accepted_tokens, Dims::of([sequences])),
            (Parameter::Out, self.out, value.shape),
        ];
        all.into_iter().filter_map(|(parameter, desc, shape)| Some((parameter, desc?, shape)))
    }

    fn dtypes(&self, target: Target) -> Checked {
        for (argument, desc) in self.each_tensor() {
            let allowed: &[DType] = match argument.parameter {
                Parameter::State if target.cann >= V9_2 => &[Bf16, Float],
                Parameter::G | Parameter::Gk => &[Float],
                Parameter::ActualSeqLengths | Parameter::SsmStateIndices | Parameter::NumAcceptedTokens => &[Int32],
                _ => &[Bf16],
            };
            DTYPE.takes(Named(argument.acl_name(), desc.dtype), allowed)?;
        }
        Ok(())
    }
}

/// A pool of states as a launch walks it: the matrices of states are dense, and before 9.1 the whole pool.
fn walked_state(state: &TensorDesc, dense: bool) -> TensorDesc {
    let packed = TensorDesc { offset: state.offset, ..TensorDesc::packed(state.dtype, state.shape) };
    if dense || state.shape.rank() != 4 {
        return packed;
    }
    let strides = packed.strides.with(0, state.strides[0]).with(1, state.strides[1]);
    TensorDesc { strides, ..packed }
}

impl WalkedTensors<RecurrentDeltaCall> for DeltaRuleProblem {
    fn walked_shape(&self, call: &RecurrentDeltaCall, parameter: Parameter, desc: &TensorDesc) -> Option<Dims> {
        if self.is_idle() {
            return None;
        }
        let mut all = call.per_token(call.value.as_ref()?);
        all.find(|(own, ..)| *own == parameter).map(|(_, _, shape)| shape).or(Some(desc.shape))
    }

    fn walked(&self, call: &RecurrentDeltaCall, parameter: Parameter, desc: &TensorDesc) -> Option<TensorDesc> {
        let shape = self.walked_shape(call, parameter, desc)?;
        match parameter {
            Parameter::State => Some(walked_state(desc, self.dense_state)),
            _ => Some(desc.read_as(shape)),
        }
    }
}
