//! Where the scales of MXFP8 are in memory: one for 32 elements along the head dimension of query and key, and along
//! the tokens of the value, in pairs.

use super::rules::Facts;
use super::rules::ascend950::mxfp8::{LANES, PAIR};
use super::{Cache, FiaCall};
use crate::attention_problem::{Counts, Cut, Cuts, Grid, ScaleOffset, SmallTensor, TensorRole};
use crate::{TensorDesc, View};

/// Elements that share a scale.
const GROUP: i64 = FiaCall::MXFP8_GROUP;
/// Scales of the query, `[T, N, D/64, 2]`, or grouped by key heads, `[Nk, T, G, D/64, 2]`.
pub(super) fn query(f: &Facts<'_>) -> Option<ScaleOffset> {
    let desc = f.call.dequant_scale_query.as_ref()?;
    let role = TensorRole::QueryScale;
    let (strides, head, slot) = match desc.strides[..] {
        [row, head, pair, slot] => ([0, head, row, pair], Cut::NONE, slot),
        [kv_head, row, head, pair, slot] => {
            let group = f.call.num_heads / f.kv_heads.max(1);
            ([0, kv_head, row, pair], Cut::new(group, 1, head), slot)
        }
        _ => return None,
    };
    let cuts = Cuts { head, dim: Cut::new(PAIR, GROUP, slot), ..Cuts::NONE };
    Some(scales(desc, role, strides, cuts, Counts::Stored))
}

/// Scales of the key: `[T, Nk, D/64, 2]`; of a cache `[blocks, Nk, block size, D/64, 2]`, or
/// `[blocks, Nk, block size/16, D/64, 16, 2]` for NZ.
pub(super) fn key(f: &Facts<'_>) -> Option<ScaleOffset> {
    let desc = f.call.key_antiquant_scale.as_ref()?;
    let role = TensorRole::KeyScale;
    let (strides, row, slot) = match (f.cache, &desc.strides[..]) {
        (None, &[row, head, pair, slot]) => ([0, head, row, pair], Cut::NONE, slot),
        (Some(Cache::Nz), &[block, head, rows, pair, row, slot]) => {
            ([block, head, rows, pair], Cut::new(LANES, 1, row), slot)
        }
        (Some(_), &[block, head, row, pair, slot]) => ([block, head, row, pair], Cut::NONE, slot),
        _ => return None,
    };
    let cuts = Cuts { row, dim: Cut::new(PAIR, GROUP, slot), ..Cuts::NONE };
    Some(scales(desc, role, strides, cuts, Counts::Stored))
}

/// Scales of the value, whose groups begin anew with each sequence: `[groups, Nk, D, 2]`; of a cache
/// `[blocks, Nk, block size/64, D, 2]`, or `[blocks, Nk, D/16, block size/64, 16, 2]` for NZ.
pub(super) fn value(f: &Facts<'_>) -> Option<ScaleOffset> {
    let desc = f.call.value_antiquant_scale.as_ref()?;
    let role = TensorRole::ValueScale;
    let (strides, dim, slot, counts) = match (f.cache, &desc.strides[..]) {
        (None, &[pair, head, dim, slot]) => ([pair, head, pair, dim], Cut::NONE, slot, Counts::Concatenated),
        (Some(Cache::Nz), &[block, head, dims, pair, dim, slot]) => {
            let dim = Cut::new(LANES, 1, dim);
            ([block, head, pair, dims], dim, slot, Counts::Stored)
        }
        (Some(_), &[block, head, pair, dim, slot]) => ([block, head, pair, dim], Cut::NONE, slot, Counts::Stored),
        _ => return None,
    };
    let cuts = Cuts { row: Cut::new(PAIR, GROUP, slot), dim, ..Cuts::NONE };
    Some(scales(desc, role, strides, cuts, counts))
}

fn scales(
    desc: &TensorDesc,
    role: TensorRole,
    [batch, head, row, dim]: [i64; 4],
    cuts: Cuts,
    counts: Counts,
) -> ScaleOffset {
    let view = View { offset: desc.offset, batch, head, row, dim };
    let scale = Grid { tensor: SmallTensor::new(role, desc, desc.dtype), view, cuts, counts };
    ScaleOffset { scale, offset: None }
}
