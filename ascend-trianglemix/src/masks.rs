//! The masks of the parts of the causal triangle.

use ascend_attention::mask::Masks;
use ascend_attention::spec::geometry::{TriangleMix, TrianglePart, TriangleRows};
use ascend_attention::{CausalOrigin, Mask, Result};

use crate::layers::TriangleLayers;

/// The masks of TriangleMix, made by the [`Masks`] of a device: they hide the middle of the causal triangle of a
/// prompt, in deep layers.
pub trait TriangleMasks {
    /// A part of the causal triangle for rows of a prompt, as a full INT8 tensor for sparse mode 1
    /// ([`Masks::geometry`]). Dense is sparse mode 3, whose template serves every length; so is a triangle that leaves
    /// nothing out.
    ///
    /// The tensor has as many rows as the call and as many keys as are there. Parts that leave rows without keys
    /// ([`TrianglePart::Last`], [`TrianglePart::Middle`]) need a corrected
    /// [`inner_precise`](ascend_attention::FusedInferAttention::inner_precise).
    ///
    /// # Errors
    /// As for [`Stream::upload`](ascend_attention::Stream::upload).
    fn triangle_mix(&self, sizes: TriangleMix, part: TrianglePart, rows: TriangleRows) -> Result<Mask>;

    /// The mask of one layer for a first row and a number of rows: the triangle where `layers` has the layer, dense
    /// elsewhere. `prompt_len` is the length of the whole prompt; while that is not known, and for single decoding
    /// rows, every layer is dense.
    ///
    /// # Errors
    /// As for [`Stream::upload`](ascend_attention::Stream::upload).
    fn triangle_layer(
        &self,
        sizes: TriangleMix,
        layers: &TriangleLayers,
        layer: usize,
        rows: (u64, u64),
        prompt_len: Option<u64>,
    ) -> Result<Mask>;
}

impl TriangleMasks for Masks<'_> {
    fn triangle_mix(&self, sizes: TriangleMix, part: TrianglePart, rows: TriangleRows) -> Result<Mask> {
        let dense = match part {
            TrianglePart::Dense => true,
            TrianglePart::Triangle => !sizes.leaves_out(rows),
            TrianglePart::Streaming | TrianglePart::Last | TrianglePart::Middle => false,
        };
        match dense {
            true => self.causal(CausalOrigin::RightDown),
            false => self.geometry(sizes.geometry(part, rows)),
        }
    }

    fn triangle_layer(
        &self,
        sizes: TriangleMix,
        layers: &TriangleLayers,
        layer: usize,
        (first_row, rows): (u64, u64),
        prompt_len: Option<u64>,
    ) -> Result<Mask> {
        match prompt_len {
            Some(prompt_len) if rows > 1 && layers.contains(layer) => {
                let rows = TriangleRows { first_row, rows, prompt_len };
                self.triangle_mix(sizes, TrianglePart::Triangle, rows)
            }
            _ => self.causal(CausalOrigin::RightDown),
        }
    }
}
