//! What the operators of sparse attention share: the sequences of a call, which keys a query row may use, and what is
//! wrong with the lengths and tables that are only known on the device.

mod contents;
mod rules;
mod sequences;

pub use contents::{Side, SparseFault, checked_contents, unusual_contents};
pub(crate) use rules::{SequenceRules, SequenceTensors, checked_by_sequences, sequence_rules, shaped};
pub use sequences::{Room, SparseContents, SparseSequence, SparseSequences, TokenLayout};
