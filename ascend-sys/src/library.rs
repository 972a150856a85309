//! The libraries that make up the C ABI.

use std::fmt;

/// The library that exports a function.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Library {
    /// Runtime: devices, streams, events, memory, graphs.
    Ascendcl,
    /// Descriptors and executors of operators.
    Nnopbase,
    /// The operators.
    Opapi,
    /// Communicators, and the collectives between their ranks. A toolkit can do without it.
    Hccl,
}

impl Library {
    /// All libraries, in the order in which they have to be opened: each needs those before it.
    pub const ALL: [Self; 4] = [Self::Ascendcl, Self::Nnopbase, Self::Opapi, Self::Hccl];

    /// Whether loading fails without the library. Where another one is absent, its functions are missing.
    pub const fn is_required(self) -> bool {
        !matches!(self, Self::Hccl)
    }

    /// The usual file name of the library.
    pub const fn file_name(self) -> &'static str {
        match self {
            Self::Ascendcl => "libascendcl.so",
            Self::Nnopbase => "libnnopbase.so",
            Self::Opapi => "libopapi.so",
            Self::Hccl => "libhccl.so",
        }
    }

    /// The files of which any one can stand for the library, in the order in which they are opened.
    pub(crate) const fn files(self) -> &'static [&'static str] {
        match self {
            Self::Ascendcl => &["libascendcl.so"],
            Self::Nnopbase => &["libnnopbase.so"],
            // Newer releases keep attention in a library of its own.
            Self::Opapi => &["libopapi_transformer.so", "libopapi.so"],
            // Newer releases keep communicators in a library of their own, which the other one needs.
            Self::Hccl => &["libhcomm.so", "libhccl.so"],
        }
    }
}

/// Operators that users built and installed; optional.
pub(crate) const CUSTOM: &str = "libcust_opapi.so";

impl fmt::Display for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.file_name())
    }
}
