//! What a step has to do: requests, what their calls share, and what kind of step they make.

mod causality;
#[cfg(test)]
mod example;
mod mask_kind;
mod metadata;
mod multi_item;
mod padding;
mod recorded;
mod request;
mod request_check;
mod settings;
mod state;
mod step_part;

pub use causality::Causality;
pub(crate) use mask_kind::MaskedRequest;
pub use mask_kind::{MaskKind, NamedMask};
pub use metadata::AttentionMetadata;
pub use multi_item::MultiItemPrompt;
pub use recorded::RecordedBatch;
pub use request::BatchRequest;
pub use settings::BatchSettings;
pub use state::{AttentionState, Drafting, StatePolicy};
pub(crate) use step_part::StepPart;
