//! TriangleMix: prefill that leaves out the middle of the causal triangle in deep layers.

use ascend_spec::geometry::{TriangleMix, TrianglePart, TriangleRows};

use crate::error::Result;

use super::cache::{Content, MaskKey};
use super::causal::CausalOrigin;
use super::masks::Masks;
use super::triangle_layers::TriangleLayers;
use super::value::Mask;

impl Masks<'_> {
    /// A part of the causal triangle for rows of a prompt, as a full INT8 tensor for sparse mode 1. Dense is sparse
    /// mode 3, whose template serves every length; so is a triangle that leaves nothing out.
    ///
    /// The tensor has as many rows as the call and as many keys as are there. Parts that leave rows without keys
    /// ([`TrianglePart::Last`], [`TrianglePart::Middle`]) need a corrected
    /// [`inner_precise`](crate::FusedInferAttention::inner_precise).
    ///
    /// # Errors
    /// Those of an upload.
    pub fn triangle_mix(
        &self,
        sizes: TriangleMix,
        part: TrianglePart,
        rows: TriangleRows,
    ) -> Result<Mask> {
        let dense = match part {
            TrianglePart::Dense => true,
            TrianglePart::Triangle => !sizes.leaves_out(rows),
            TrianglePart::Streaming | TrianglePart::Last | TrianglePart::Middle => false,
        };
        if dense {
            return self.causal(CausalOrigin::RightDown);
        }
        let content = Content::Triangle(sizes, part, rows);
        let form = self.form();
        self.get(MaskKey { content, form }, 0, |tensor| {
            Mask::all_mask(tensor)
        })
    }

    /// The mask of one layer: the triangle where `layers` has the layer, dense elsewhere. `prompt_len` is the length of
    /// the whole prompt; while that is not known, and for single decoding rows, every layer is dense.
    ///
    /// # Errors
    /// Those of an upload.
    pub fn triangle_layer(
        &self,
        sizes: TriangleMix,
        layers: &TriangleLayers,
        layer: usize,
        (first_row, rows): (u64, u64),
        prompt_len: Option<u64>,
    ) -> Result<Mask> {
        match prompt_len {
            Some(prompt_len) if rows > 1 && layers.contains(layer) => {
                let rows = TriangleRows {
                    first_row,
                    rows,
                    prompt_len,
                };
                self.triangle_mix(sizes, TrianglePart::Triangle, rows)
            }
            _ => self.causal(CausalOrigin::RightDown),
        }
    }
}
