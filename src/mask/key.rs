//! The key of a cached mask.

use ascend_spec::geometry::LocalChunks;
use ascend_spec::{CompressedMask, MaskGeometry};

use super::form::MaskForm;

/// Everything that the content of a cached mask depends on. The device is the cache's own.
///
/// A formula is its own key: window, sinks, lengths, alignment and the place of a chunk in its prompt are all part of
/// it, so that none can be forgotten.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct MaskKey {
    pub(super) content: Content,
    pub(super) form: MaskForm,
}

/// What a cached mask shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Content {
    /// A template.
    Template(CompressedMask),
    /// A formula: the full masks of the sparse modes, parts of the causal triangle.
    Geometry(MaskGeometry),
    /// Chunks.
    Local(LocalChunks),
    /// The causal square that all smaller causal masks are views of. It grows, so that its side is no part of the key.
    CausalSquare,
}
