//! What a step has to do: requests, what their calls share, and what kind of step they make.

mod causality;
mod metadata;
mod request;
mod state;
mod step_part;

pub use causality::Causality;
pub use metadata::AttentionMetadata;
pub use request::{BatchRequest, BatchSettings, RecordedBatch, SequenceExtent};
pub use state::{AttentionState, Drafting, StatePolicy};
pub(crate) use step_part::StepPart;
