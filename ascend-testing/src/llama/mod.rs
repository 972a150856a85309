//! A language model for examples and tests: a decoder in the manner of Llama with weights from a file or made up, and
//! the same model by its definition in double precision. Attention is what the examples are about, and is theirs.

pub mod dense;
mod gguf;
mod model;
pub mod product;
mod random;
mod text;

pub use gguf::load;
pub use model::{Attended, Config, Model, download};
pub use random::{Random, generated};
pub use text::Vocabulary;
