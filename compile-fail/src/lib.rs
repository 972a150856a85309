//! Programs that `ascend-attention` and `ascend-serving` do not let compile: each file of `cases/` makes one mistake,
//! and the file beside it has what the compiler answers. `cargo test -p ascend-attention-compile-fail` tries them;
//! after a change that is meant, `TRYBUILD=overwrite` writes the answers anew.
//!
//! They are a package of their own so that tests for other processors, which cannot start a compiler, leave them out.

#![forbid(unsafe_code)]
