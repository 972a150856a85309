//! Kinds of quantisation, and the scales and offsets of a call as grids.

use super::rules::{Facts, output};
use super::{Argument, FiaCall};
use crate::attention_problem::{Counts, Cut, Cuts, Grid, ScaleOffset, SmallTensor, TensorRole};
use crate::{Axes, TensorDesc, View};

/// Elements of a token that share a scale in [`AntiquantMode::PerTokenGroup`].
const GROUP: i64 = 32;

/// The view of a grid with one entry for all elements.
fn scalar(offset: i64) -> View {
    View { offset, batch: 0, head: 0, row: 0, dim: 0 }
}

/// The description of the tensor that plays a role.
fn described<'a>(call: &'a FiaCall<'_>, role: TensorRole) -> Option<&'a TensorDesc> {
    call.tensor(Argument::of_role(role)?)
}

fn grid(call: &FiaCall<'_>, role: TensorRole, view: View, counts: Counts) -> Option<Grid> {
    let desc = described(call, role)?;
    Some(Grid {
        tensor: SmallTensor::new(role, desc, desc.dtype),
        view: View { offset: view.offset.saturating_add(desc.offset), ..view },
        cuts: Cuts::NONE,
        counts,
    })
}

fn count(desc: &TensorDesc) -> i64 {
    desc.elements().and_then(|count| i64::try_from(count).ok()).unwrap_or(i64::MAX)
}

/// Dequantisation of the keys (`half` 0) or the values (`half` 1); `None` if a scale is smaller than its mode needs.
pub(super) fn antiquant(f: &Facts<'_>, half: i64) -> Option<ScaleOffset> {
    let call = f.call;
    let split = call.key_antiquant_scale.is_some() && call.value_antiquant_scale.is_some();
    // Ascend 950 has no merged form.
    let few = f.prefill() && f.q.rows > FiaCall::MOST_DECODE_ROWS && !f.paged() && !f.target.is_950();
    let (scale, offset, mode) = match (split && !few, half) {
        (true, 0) => (TensorRole::KeyScale, TensorRole::KeyOffset, call.key_antiquant_mode),
        (true, _) => (TensorRole::ValueScale, TensorRole::ValueOffset, call.value_antiquant_mode),
        (false, _) => (TensorRole::KeyValueScale, TensorRole::KeyValueOffset, call.antiquant_mode),
    };
    let merged = scale == TensorRole::KeyValueScale;
    let desc = described(call, scale)?;
    let mut elements = count(desc);
    let mut first = 0;
    if merged {
        elements /= 2;
        first = elements * half;
    }
    // The operator checks the shape of merged mode 2 as that of mode 0.
    let mode = if merged && mode == 2 { 0 } else { mode };
    let value_dim = output::value_dim(f);
    let (n, d) = (f.kv_heads, if half == 0 { f.q.dim } else { value_dim });
    let last = desc.shape.last().copied().unwrap_or(1);
    let bs = call.block_size;
    let view = |batch, head, row, dim| View { offset: first, batch, head, row, dim };
    let mode = AntiquantMode::from_acl(mode)?;
    let tokens = Counts::Tokens;
    let groups = d / GROUP;
    let (view, counts, need) = match mode {
        AntiquantMode::PerChannel if elements == 1 => (scalar(first), tokens, 1),
        AntiquantMode::PerChannel => (view(0, d, 0, 1), tokens, n.saturating_mul(d)),
        AntiquantMode::PerToken => (view(last, 0, 1, 0), tokens, f.batch.saturating_mul(last)),
        AntiquantMode::PerTensorHead => (view(0, 1, 0, 0), tokens, n),
        AntiquantMode::PerTokenHead => {
            (view(n.saturating_mul(last), last, 1, 0), tokens, f.batch.saturating_mul(n).saturating_mul(last))
        }
        AntiquantMode::PerTokenPaged => (view(bs, 0, 1, 0), Counts::Stored, f.blocks().saturating_mul(bs)),
        AntiquantMode::PerTokenHeadPaged => {
            (view(n.saturating_mul(bs), bs, 1, 0), Counts::Stored, f.blocks().saturating_mul(n).saturating_mul(bs))
        }
        AntiquantMode::PerTokenGroup => {
            let of_head = desc.shape.get(3).copied()?.saturating_mul(groups);
            let of_token = n.saturating_mul(of_head);
            (view(of_token, of_head, groups, 1), tokens, f.batch.saturating_mul(of_token))
        }
    };
    let most = match mode {
        AntiquantMode::PerToken | AntiquantMode::PerTokenHead => last,
        AntiquantMode::PerTokenGroup => desc.shape.get(3).copied().unwrap_or(0),
        _ => i64::MAX,
    };
    if elements < need || most < f.longest_key() {
        return None;
    }
    let offset = match described(call, offset) {
        Some(desc) if count(desc) < count(described(call, scale)?) => return None,
        Some(_) => grid(call, offset, view, counts),
        None => None,
    };
    let mut scale = grid(call, scale, view, counts)?;
    if mode == AntiquantMode::PerTokenGroup {
        scale.cuts.dim = Cut::shared(GROUP);
    }
    Some(ScaleOffset { scale, offset })
}

/// Dequantisation of a quantised query of the absorbed form: one scale for each row and head.
pub(super) fn query(f: &Facts<'_>) -> Option<ScaleOffset> {
    let (n, s) = (f.q.heads, f.q.rows);
    let view = match f.layout.input() {
        Axes::Bsh | Axes::Bsnd | Axes::Tnd => View { offset: 0, batch: s.saturating_mul(n), head: 1, row: n, dim: 0 },
        _ => View { offset: 0, batch: n.saturating_mul(s), head: s, row: 1, dim: 0 },
    };
    let scale = grid(f.call, TensorRole::QueryScale, view, Counts::Stored)?;
    Some(ScaleOffset { scale, offset: None })
}

/// Dequantisation of the keys of a paged cache by one scale for each row and head, `[blocks, heads, rows]`.
pub(super) fn rows_of_blocks(f: &Facts<'_>) -> Option<ScaleOffset> {
    let desc = described(f.call, TensorRole::KeyScale)?;
    let [batch, head, row] = *desc.strides.first_chunk()?;
    let view = View { batch, head, row, ..scalar(0) };
    let scale = grid(f.call, TensorRole::KeyScale, view, Counts::Stored)?;
    Some(ScaleOffset { scale, offset: None })
}

/// Dequantisation of the values by one scale for each head.
pub(super) fn value_heads(f: &Facts<'_>) -> Option<ScaleOffset> {
    Some(ScaleOffset { scale: by_head(f.call, TensorRole::ValueScale)?, offset: None })
}

/// One scale for all of key or value.
pub(super) fn whole(f: &Facts<'_>, role: TensorRole) -> Option<ScaleOffset> {
    let scale = grid(f.call, role, scalar(0), Counts::Tokens)?;
    Some(ScaleOffset { scale, offset: None })
}

/// Quantisation of the output: one scale, or one for each head and dimension.
pub(super) fn output(f: &Facts<'_>) -> Option<ScaleOffset> {
    let desc = described(f.call, TensorRole::OutputScale)?;
    let view = if count(desc) == 1 { scalar(0) } else { View { head: output::value_dim(f), dim: 1, ..scalar(0) } };
    let offset = match &f.call.quant_offset2 {
        Some(offset) if offset.is_empty() => None,
        Some(offset) if count(offset) < count(desc) => return None,
        Some(_) => grid(f.call, TensorRole::OutputOffset, view, Counts::Tokens),
        None => None,
    };
    Some(ScaleOffset { scale: grid(f.call, TensorRole::OutputScale, view, Counts::Tokens)?, offset })
}

/// One logit a head.
pub(super) fn sink(f: &Facts<'_>) -> Option<Grid> {
    by_head(f.call, TensorRole::Sink)
}

/// One slope a head.
pub(super) fn slopes(f: &Facts<'_>) -> Option<Grid> {
    by_head(f.call, TensorRole::Bias)
}

/// A tensor with one number a head; `None` if it is not given or empty.
fn by_head(call: &FiaCall<'_>, role: TensorRole) -> Option<Grid> {
    let desc = described(call, role).filter(|desc| !desc.is_empty())?;
    let view = View { head: desc.strides.first().copied().unwrap_or(0), ..scalar(0) };
    grid(call, role, view, Counts::Tokens)
}

/// Kind of antiquantisation: which elements of key or value share a scale (`antiquantMode`, `keyAntiquantMode`,
/// `valueAntiquantMode`). The discriminant is CANN's number.
///
/// B sequences, N key heads, S keys, D head dimension; a paged cache has `blocks` blocks of `block_size` tokens. The
/// shapes are those of separate scales on Ascend 950, and on Atlas A2 and A3 with one query row a sequence; with
/// several rows Atlas A2 and A3 take them without the leading 1. A refusal by
/// [`FiaCall::check`](super::FiaCall::check) names the shapes that the call may have.
///
/// Source: aclnnFusedInferAttentionScore V2, parameter tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum AntiquantMode {
    /// A scale for each head and dimension: `[1, N, 1, D]`, `[1, N, D]` or `[1, N * D]`, as the layout orders them; or
    /// one for all (per tensor): `[1]`.
    PerChannel = 0,
    /// A scale for each token: FLOAT32 `[1, B, S]`.
    PerToken = 1,
    /// A scale for each head: `[N]`.
    PerTensorHead = 2,
    /// A scale for each token and head: FLOAT32 `[B, N, S]`.
    PerTokenHead = 3,
    /// A scale for each slot of a paged cache: FLOAT32 `[blocks, block_size]`.
    PerTokenPaged = 4,
    /// A scale for each slot and head of a paged cache: FLOAT32 `[blocks, N, block_size]`.
    PerTokenHeadPaged = 5,
    /// A scale for each token, head and 32 elements: FLOAT8_E8M0 `[1, B, N, S, D/32]`, for FLOAT4_E2M1 keys of Ascend
    /// 950.
    PerTokenGroup = 6,
}

impl AntiquantMode {
    /// Every mode, in the order of CANN's numbers.
    pub const ALL: [AntiquantMode; 7] = [
        AntiquantMode::PerChannel,
        AntiquantMode::PerToken,
        AntiquantMode::PerTensorHead,
        AntiquantMode::PerTokenHead,
        AntiquantMode::PerTokenPaged,
        AntiquantMode::PerTokenHeadPaged,
        AntiquantMode::PerTokenGroup,
    ];

    /// CANN's number.
    pub const fn acl(self) -> i64 {
        self as i64
    }

    /// The mode with CANN's number `value`.
    pub fn from_acl(value: i64) -> Option<Self> {
        Self::ALL.into_iter().find(|mode| mode.acl() == value)
    }
}
