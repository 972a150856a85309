//! Versions of operators: the functions of each, and which releases and products have them.

use crate::{Cann, Soc, Target};
use std::fmt;

/// One version of an operator: a pair of functions, and the releases and products that have them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct OperatorVersion {
    number: u8,
    symbol: &'static str,
    since_cann: &'static str,
    exported: Cann,
    /// First release whose headers or documents announce its end.
    deprecated: Option<Cann>,
    /// First release on Atlas A2 and A3.
    a2_a3: Option<Cann>,
    /// First release on Ascend 950.
    ascend950: Option<Cann>,
    /// First release on the Atlas inference series.
    inference: Option<Cann>,
    /// First release on the Atlas training series.
    training: Option<Cann>,
    label: &'static str,
}

impl OperatorVersion {
    /// A version that every known release exports and no product has yet: `number` counts the operator's versions
    /// from 1, `symbol` is the function of phase two, and `since_cann` is [`Self::since_cann`].
    pub(crate) const fn new(number: u8, symbol: &'static str, since_cann: &'static str) -> Self {
        OperatorVersion {
            number,
            symbol,
            since_cann,
            exported: Cann::V8_1,
            deprecated: None,
            a2_a3: None,
            ascend950: None,
            inference: None,
            training: None,
            label: symbol,
        }
    }

    /// This version, with libraries that export it from release `exported` on.
    pub(crate) const fn exported_since(self, exported: Cann) -> Self {
        OperatorVersion { exported, ..self }
    }

    /// This version, announced to go from release `deprecated` on.
    pub(crate) const fn deprecated_since(self, deprecated: Cann) -> Self {
        OperatorVersion { deprecated: Some(deprecated), ..self }
    }

    /// This version, on Atlas A2 and A3 from release `since` on.
    pub(crate) const fn on_a2_a3(self, since: Cann) -> Self {
        OperatorVersion { a2_a3: Some(since), ..self }
    }

    /// This version, on Ascend 950 from release `since` on.
    pub(crate) const fn on_ascend950(self, since: Cann) -> Self {
        OperatorVersion { ascend950: Some(since), ..self }
    }

    /// This version, on the Atlas inference series from release `since` on.
    pub(crate) const fn on_inference_cards(self, since: Cann) -> Self {
        OperatorVersion { inference: Some(since), ..self }
    }

    /// This version, on the Atlas training series from release `since` on.
    pub(crate) const fn on_training_cards(self, since: Cann) -> Self {
        OperatorVersion { training: Some(since), ..self }
    }

    /// This version, displayed as `label` instead of its symbol.
    pub(crate) const fn shown_as(self, label: &'static str) -> Self {
        OperatorVersion { label, ..self }
    }

    /// The version's number among the operator's versions: 1 for the first.
    pub const fn number(self) -> u8 {
        self.number
    }

    /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
    pub const fn symbol(self) -> &'static str {
        self.symbol
    }

    /// The CANN releases known to export this version, as text that follows "CANN": the first release, or `after` a
    /// release that does not.
    pub const fn since_cann(self) -> &'static str {
        self.since_cann
    }

    /// Whether a function is this version's phase one, its phase two or its `GetMaxWorkspaceSize`.
    pub fn has_function(self, name: &str) -> bool {
        let phase = name.strip_prefix(self.symbol);
        phase.is_some_and(|phase| ["", "GetWorkspaceSize", "GetMaxWorkspaceSize"].contains(&phase))
    }

    /// Whether the libraries of a release export this version. For versions added after 8.1 in an unknown release the
    /// answer is true for every release.
    pub fn is_exported(self, cann: Cann) -> bool {
        cann >= self.exported
    }

    /// Whether a release announces that this version will go.
    pub fn is_deprecated(self, cann: Cann) -> bool {
        self.deprecated.is_some_and(|since| cann >= since)
    }

    /// The products that have this version, with their releases.
    pub(crate) fn products(self) -> Products {
        Products(self)
    }

    /// Whether a product has this version in a release.
    pub fn runs_on(self, target: Target) -> bool {
        let since = match target.soc {
            Soc::AtlasA2 | Soc::AtlasA3 => self.a2_a3,
            Soc::Ascend950 => self.ascend950,
            Soc::AtlasInference => self.inference,
            Soc::AtlasTraining => self.training,
            Soc::Atlas200I500A2 => None,
        };
        since.is_some_and(|since| target.cann >= since)
    }
}

/// The products of a version in the texts of refusals.
pub(crate) struct Products(OperatorVersion);

impl fmt::Display for Products {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let OperatorVersion { a2_a3, ascend950, inference, training, .. } = self.0;
        let series = [
            ("Atlas A2 and A3", a2_a3),
            ("Ascend 950", ascend950),
            ("the Atlas inference series (310P)", inference),
            ("the Atlas training series", training),
        ];
        let mut separator = "";
        for (series, since) in series {
            let Some(since) = since else { continue };
            let or_newer = if since.is_preview() { "" } else { " or newer" };
            write!(f, "{separator}{series} with {}{or_newer}", since.name())?;
            separator = ", ";
        }
        Ok(())
    }
}

impl fmt::Display for OperatorVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.label)
    }
}

/// The versions of one operator.
pub trait DeclaredVersion: Copy + PartialEq + Send + Sync + 'static {
    /// Every version, oldest first.
    const ALL: &'static [Self];

    /// The declaration of the version.
    fn info(self) -> OperatorVersion;

    /// The versions that a product has in a release, oldest first, but deprecated ones behind the others.
    fn preferred_on(target: Target) -> impl Iterator<Item = Self> {
        let with = move |deprecated: bool| {
            let versions = Self::ALL.iter().copied();
            versions.filter(move |version| {
                let info = version.info();
                info.runs_on(target) && info.is_deprecated(target.cann) == deprecated
            })
        };
        with(false).chain(with(true))
    }
}

/// Makes the enum `Version` of an operator: one line for each version, with its documentation and its declaration.
macro_rules! versions {
    ($(#[$meta:meta])* pub enum Version { $($(#[$doc:meta])+ $variant:ident = $info:expr,)+ }) => {
        $(#[$meta])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        pub enum Version {
            $($(#[$doc])+ $variant,)+
        }

        impl Version {
            /// Every version, oldest first.
            pub const ALL: [Version; [$(stringify!($variant)),+].len()] = [$(Version::$variant),+];

            /// The declaration of the version.
            pub const fn info(self) -> $crate::operator::OperatorVersion {
                match self {
                    $(Version::$variant => $info,)+
                }
            }

            /// The version with this declaration; `None` for a version of another operator.
            pub fn of(info: $crate::operator::OperatorVersion) -> Option<Version> {
                Version::ALL.into_iter().find(|version| version.info() == info)
            }

            /// Name of the phase-two function; phase one appends `GetWorkspaceSize`.
            pub const fn symbol(self) -> &'static str {
                self.info().symbol()
            }

            /// The CANN releases known to export this version, as text that follows "CANN": the first release, or
            /// `after` a release that does not.
            pub const fn since_cann(self) -> &'static str {
                self.info().since_cann()
            }

            /// Whether a product has this version in a release.
            pub fn runs_on(self, target: $crate::Target) -> bool {
                self.info().runs_on(target)
            }

            /// The version's number: 1 for the first.
            pub const fn number(self) -> u8 {
                self.info().number()
            }
        }

        impl $crate::operator::DeclaredVersion for Version {
            const ALL: &'static [Self] = &Version::ALL;

            fn info(self) -> $crate::operator::OperatorVersion {
                Version::info(self)
            }
        }

        impl std::fmt::Display for Version {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                self.info().fmt(f)
            }
        }
    };
}

pub(crate) use versions;
