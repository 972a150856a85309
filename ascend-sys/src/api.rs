//! The function table that callers use: each function is looked up on first use.

use std::fmt;
use std::path::Path;
use std::sync::OnceLock;

use crate::functions::Functions;
use crate::library::Library;
use crate::load::{Attempt, LoadError, Loaded, Outcome};
use crate::search::Search;

/// The error for a function that the libraries in use do not have, usually because the installed CANN is older than
/// it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{library} does not export {symbol}; the CANN in use has no such function")]
pub struct MissingSymbol {
    /// File of the library that should export it.
    pub library: &'static str,
    /// Name of the C function.
    pub symbol: &'static str,
}

/// Where the functions of an [`Api`] come from.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Origin {
    /// Libraries that were opened, with all paths tried, in order.
    Loaded(Vec<Attempt>),
    /// Libraries that the program is linked against.
    Linked,
    /// A table of functions, under the name that its maker gave it.
    Functions(String),
}

impl Origin {
    /// The libraries in use and their files.
    pub fn libraries(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let attempts = match self {
            Self::Loaded(attempts) => attempts.as_slice(),
            _ => &[],
        };
        let opened = attempts.iter().filter(|attempt| attempt.outcome == Outcome::Opened);
        opened.map(|attempt| (attempt.file, attempt.path.as_path()))
    }
}

impl fmt::Display for Origin {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Linked => f.write_str("the libraries that the program is linked against"),
            Self::Functions(name) => f.write_str(name),
            Self::Loaded(_) => {
                for (index, (_, path)) in self.libraries().enumerate() {
                    write!(f, "{}{}", if index == 0 { "" } else { ", " }, path.display())?;
                }
                Ok(())
            }
        }
    }
}

/// Where a function that has not been looked up yet is searched for.
#[derive(Debug)]
enum Source {
    /// Nowhere: the table was complete from the start.
    Nothing,
    Loaded(Loaded),
    /// Among all libraries that the process has loaded.
    #[cfg(all(feature = "link", unix))]
    Process(libloading::Library),
}

impl Source {
    /// # Safety
    /// `F` must be the type of a pointer to the function that `symbol` (with its NUL) names.
    unsafe fn find<F: Copy>(&self, library: Library, symbol: &'static [u8]) -> Option<F> {
        match self {
            Self::Nothing => None,
            // SAFETY: the caller must uphold the same condition.
            Self::Loaded(loaded) => unsafe { loaded.find(library, symbol) },
            #[cfg(all(feature = "link", unix))]
            // SAFETY: the caller must uphold the same condition.
            Self::Process(process) => unsafe { process.get::<Option<F>>(symbol) }.ok().and_then(|found| *found),
        }
    }
}

macro_rules! define {
    ($( [$library:ident] fn $name:ident ( $( $argument:ident : $type:ty ),* ) -> $result:ty ; )*) => {
        /// The state of each function: not looked up yet, missing, or its address.
        #[derive(Default)]
        #[allow(non_snake_case, reason = "the names are those of the C functions")]
        struct Resolved {
            $( $name: OnceLock<Option<unsafe extern "C" fn($( $argument: $type ),*) -> $result>>, )*
        }

        impl Resolved {
            /// Makes the state from a table. Functions that the table lacks are missing if it is `complete`, and
            /// looked up later otherwise.
            fn from_functions(functions: &Functions, complete: bool) -> Self {
                let resolved = Self::default();
                $(
                    if complete || functions.$name.is_some() {
                        // The cell is new, so it cannot be set already.
                        let _ = resolved.$name.set(functions.$name);
                    }
                )*
                resolved
            }
        }

        /// Every function of the ABI and the library that exports it, in the order of the headers.
        pub const FUNCTIONS: &[(&str, Library)] = &[$( (stringify!($name), Library::$library) ),*];

        /// One accessor for each function of the C ABI, named like the function. Each looks its function up on first
        /// use and remembers it; calling the returned pointer is `unsafe` and follows the function's C documentation.
        #[allow(non_snake_case, reason = "the names are those of the C functions")]
        impl Api {
            $(
                #[doc = concat!("[`", stringify!($name), "`](crate::bindings::", stringify!($name), ") of ")]
                #[doc = concat!("[`", stringify!($library), "`](Library::", stringify!($library), ").")]
                ///
                /// # Errors
                /// The libraries in use do not export it.
                #[inline]
                pub fn $name(
                    &self,
                ) -> Result<unsafe extern "C" fn($( $argument: $type ),*) -> $result, MissingSymbol> {
                    let found = self.resolved.$name.get_or_init(|| {
                        let symbol = concat!(stringify!($name), "\0").as_bytes();
                        // SAFETY: the type is the one that the headers declare for this name.
                        unsafe { self.source.find(Library::$library, symbol) }
                    });
                    found.ok_or(MissingSymbol {
                        library: Library::$library.file_name(),
                        symbol: stringify!($name),
                    })
                }
            )*

            /// Whether the function of this name is available. False for names that are not part of the ABI covered
            /// here.
            pub fn has(&self, name: &str) -> bool {
                match name {
                    $( stringify!($name) => self.$name().is_ok(), )*
                    _ => false,
                }
            }
        }
    };
}

for_each_function! { define }

/// The C ABI of CANN as a table of functions.
///
/// Making one either opens libraries ([`load`](Self::load), [`load_from`](Self::load_from)), uses those that the
/// program is linked against (`linked`, feature `link`), or takes another implementation
/// ([`from_functions`](Self::from_functions)). A function that is absent is an error of its accessor and of nothing
/// else. An `Api` holds no state of the device: making one initialises nothing, dropping one ends nothing.
///
/// `Api` is `Send` and `Sync`; share it by reference or `Arc`. Libraries stay open until the process ends, since they
/// run threads of their own; function pointers therefore stay valid after the `Api` is gone.
pub struct Api {
    resolved: Resolved,
    source: Source,
    origin: Origin,
}

impl Api {
    /// Opens the libraries of the installed CANN: in `$ASCEND_HOME_PATH/lib64`, in `$ASCEND_TOOLKIT_HOME/lib64`, then
    /// in the dynamic loader's own search path.
    ///
    /// # Errors
    /// No usable `libascendcl.so`, `libnnopbase.so` or operator library; the error lists what was tried.
    ///
    /// # Safety
    /// Opening a library runs its initialisers, and its functions are called by the types declared here: these
    /// folders must contain the libraries of CANN, or others with the same ABI.
    pub unsafe fn load() -> Result<Self, LoadError> {
        // SAFETY: the caller must uphold the same condition.
        unsafe { Self::load_with(&Search::standard()) }
    }

    /// Opens the libraries in a folder; those that it does not have are searched for as by [`load`](Self::load).
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    ///
    /// # Safety
    /// As for [`load`](Self::load).
    pub unsafe fn load_from(folder: &Path) -> Result<Self, LoadError> {
        // SAFETY: the caller must uphold the same condition.
        unsafe { Self::load_with(&Search::new().folder(folder).environment().loader_path()) }
    }

    /// Opens the libraries that a search finds.
    ///
    /// # Errors
    /// As for [`load`](Self::load).
    ///
    /// # Safety
    /// As for [`load`](Self::load).
    pub unsafe fn load_with(search: &Search) -> Result<Self, LoadError> {
        // SAFETY: the caller must uphold the same condition.
        let loaded = unsafe { Loaded::open(search) }?;
        Ok(Self {
            resolved: Resolved::default(),
            origin: Origin::Loaded(loaded.attempts.clone()),
            source: Source::Loaded(loaded),
        })
    }

    /// Uses the libraries that the program is linked against. Functions that CANN 8.1 need not export are looked up
    /// in the process, so that the program starts with older libraries as well.
    #[cfg(feature = "link")]
    #[cfg_attr(docsrs, doc(cfg(feature = "link")))]
    pub fn linked() -> Self {
        Self {
            resolved: Resolved::from_functions(&crate::bindings::linked(), false),
            #[cfg(unix)]
            source: Source::Process(libloading::os::unix::Library::this().into()),
            #[cfg(not(unix))]
            source: Source::Nothing,
            origin: Origin::Linked,
        }
    }

    /// Uses another implementation of the ABI, named by `origin`. Functions that the table leaves out are missing.
    pub fn from_functions(functions: Functions, origin: &str) -> Self {
        Self {
            resolved: Resolved::from_functions(&functions, true),
            source: Source::Nothing,
            origin: Origin::Functions(origin.to_owned()),
        }
    }

    /// Whether [`load`](Self::load) would find the files it needs; see [`Search::is_available`].
    pub fn is_available() -> bool {
        Search::standard().is_available()
    }

    /// Where the functions come from.
    pub fn origin(&self) -> &Origin {
        &self.origin
    }
}

impl fmt::Debug for Api {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Api").field("origin", &self.origin).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::c_char;
    use std::ptr;

    use super::*;
    use crate::bindings::aclError;

    unsafe extern "C" fn init(_: *const c_char) -> aclError {
        42
    }

    #[test]
    fn a_table_has_what_it_was_given_and_names_what_it_lacks() {
        let functions = Functions { aclInit: Some(init), ..Functions::default() };
        assert_eq!(functions.names().collect::<Vec<_>>(), ["aclInit"]);
        let api = Api::from_functions(functions, "a test");
        // SAFETY: `init` above takes any pointer.
        assert_eq!(unsafe { api.aclInit().unwrap()(ptr::null()) }, 42);
        assert!(api.has("aclInit") && !api.has("aclFinalize") && !api.has("printf"));
        let missing = api.aclCreateTensor().unwrap_err();
        assert_eq!((missing.library, missing.symbol), ("libnnopbase.so", "aclCreateTensor"));
        let missing = api.aclnnFusedInferAttentionScoreV5().unwrap_err();
        assert_eq!(
            missing.to_string(),
            "libopapi.so does not export aclnnFusedInferAttentionScoreV5; the CANN in use has no such function"
        );
        assert_eq!(api.origin().to_string(), "a test");
        assert_eq!(api.origin().libraries().count(), 0);
    }

    #[test]
    fn the_table_can_be_shared() {
        fn shared<T: Send + Sync + 'static>() {}
        shared::<Api>();
        shared::<Functions>();
        shared::<LoadError>();
    }

    #[test]
    fn every_function_has_a_library_by_its_name() {
        assert!(FUNCTIONS.len() > 100);
        for (name, library) in FUNCTIONS {
            // A function with a phase one is an operator's.
            let end = name.find("Get").unwrap_or(name.len());
            let phase_one = format!("{}GetWorkspaceSize", &name[..end]);
            let is_operator = FUNCTIONS.iter().any(|(name, _)| *name == phase_one);
            let expected = if is_operator {
                Library::Opapi
            } else if ["aclrt", "aclmdl", "aclsys"].iter().any(|prefix| name.starts_with(prefix)) {
                Library::Ascendcl
            } else if ["aclCreate", "aclDestroy", "aclSet", "AclSet", "aclnn"].iter().any(|p| name.starts_with(p)) {
                Library::Nnopbase
            } else {
                continue;
            };
            assert_eq!(*library, expected, "{name}");
        }
    }
}
