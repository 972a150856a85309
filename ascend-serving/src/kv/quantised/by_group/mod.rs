//! MXFP8: 32 numbers share a scale, in keys along the elements of a head, in values along the tokens of a block.

mod group_quantiser;
mod group_scales;
mod mxfp8;
mod value_pair;

pub(in crate::kv) use group_quantiser::GroupQuantiser;
pub(crate) use group_scales::GroupScales;
pub(crate) use mxfp8::{GROUP, quantise_mxfp8};
