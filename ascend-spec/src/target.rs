//! What a contract holds for: a product, and a CANN release.

use crate::Soc;
use std::fmt;

/// A CANN release, as far as the contracts of the operators tell releases apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Cann {
    /// 8.1 to 8.4. Of them only the headers are known; the checks are those of a development snapshot of late 2025,
    /// which no release equals and which stands in for all of them.
    V8_1,
    /// 8.5.
    V8_5,
    /// 9.0.
    V9_0,
    /// 9.1.
    V9_1,
}

impl Cann {
    /// Every release, oldest first.
    pub const ALL: [Cann; 4] = [Cann::V8_1, Cann::V8_5, Cann::V9_0, Cann::V9_1];

    /// The newest release whose contract is known.
    pub const NEWEST: Cann = Cann::V9_1;

    /// The release's name, `major.minor`.
    pub const fn name(self) -> &'static str {
        match self {
            Cann::V8_1 => "8.1",
            Cann::V8_5 => "8.5",
            Cann::V9_0 => "9.0",
            Cann::V9_1 => "9.1",
        }
    }

    /// The contract of the toolkit that calls itself `version`, such as `8.5.0` or `9.0.RC1`. `None` for what begins with no `major.minor`, and for releases before 8.1.
    ///
    /// ```
    /// use ascend_spec::{Cann, Release, Target};
    ///
    /// let release = |version| Cann::of_version(version);
    /// assert_eq!(release("8.3.RC1"), Some(Release::Known(Cann::V8_1)));
    /// assert_eq!(release("9.0.1"), Some(Release::Known(Cann::V9_0)));
    /// assert_eq!(release("9.2.0"), Some(Release::Newer(Cann::V9_1)));
    /// assert_eq!(release("7.0.0"), None);
    /// ```
    pub fn of_version(version: &str) -> Option<Release> {
        let mut numbers = version.trim().split('.');
        let major: u32 = numbers.next()?.parse().ok()?;
        let minor = numbers.next()?;
        let digits = minor
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(minor.len());
        let minor: u32 = minor.get(..digits)?.parse().ok()?;
        match (major, minor) {
            (8, 1..=4) => Some(Release::Known(Cann::V8_1)),
            (8, 5..) => Some(Release::Known(Cann::V8_5)),
            (9, 0) => Some(Release::Known(Cann::V9_0)),
            (9, 1) => Some(Release::Known(Cann::V9_1)),
            (9.., _) => Some(Release::Newer(Cann::NEWEST)),
            _ => None,
        }
    }
}

impl fmt::Display for Cann {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The contract for a toolkit's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Release {
    /// That of the release itself.
    Known(Cann),
    /// The release is newer than every known one: the contract of the newest known one stands in.
    Newer(Cann),
}

impl Release {
    /// The release whose contract applies.
    pub const fn cann(self) -> Cann {
        match self {
            Release::Known(cann) | Release::Newer(cann) => cann,
        }
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Release::Known(cann) => cann.fmt(f),
            Release::Newer(cann) => {
                write!(f, "{cann}, the newest known, for a release newer than it")
            }
        }
    }
}

/// A product and a CANN release: what a call is checked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Target {
    /// Product.
    pub soc: Soc,
    /// Release.
    pub cann: Cann,
}

impl Target {
    /// `soc` with `cann`.
    pub const fn new(soc: Soc, cann: Cann) -> Self {
        Target { soc, cann }
    }

    /// `soc` with the snapshot that stands in for releases 8.1 to 8.4.
    pub const fn snapshot(soc: Soc) -> Self {
        Target::new(soc, Cann::V8_1)
    }

    /// Whether the release knows the product.
    pub fn is_released(self) -> bool {
        self.soc != Soc::Ascend950 || self.cann >= Cann::V9_0
    }

    /// Whether the unified checks of Ascend 950 apply. The releases before 9.0 do not know the product: its contract
    /// there is that of Atlas A2 with the arguments of V5.
    pub(crate) fn is_950(self) -> bool {
        self.soc == Soc::Ascend950 && self.is_released()
    }
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} with CANN {}", self.soc, self.cann)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_ordered_and_named() {
        assert!(Cann::ALL.is_sorted());
        assert_eq!(Cann::ALL.last(), Some(&Cann::NEWEST));
        for cann in Cann::ALL {
            assert_eq!(Cann::of_version(cann.name()), Some(Release::Known(cann)));
        }
    }

    #[test]
    fn versions_of_toolkits_find_their_contract() {
        use Release::{Known, Newer};
        for (version, release) in [
            ("8.1.RC1", Some(Known(Cann::V8_1))),
            ("8.2", Some(Known(Cann::V8_1))),
            ("8.5.0.alpha001", Some(Known(Cann::V8_5))),
            ("8.5RC2", Some(Known(Cann::V8_5))),
            ("8.9.9", Some(Known(Cann::V8_5))),
            (" 9.0.0\n", Some(Known(Cann::V9_0))),
            ("9.1.0-beta.1", Some(Known(Cann::V9_1))),
            ("9.10.0", Some(Newer(Cann::V9_1))),
            ("12.0", Some(Newer(Cann::V9_1))),
            ("8.0.RC3", None),
            ("7.3", None),
            ("9", None),
            ("9.x", None),
            ("", None),
            ("99999999999.1", None),
        ] {
            assert_eq!(Cann::of_version(version), release, "{version}");
        }
        assert!(Newer(Cann::V9_1).to_string().contains("newest known"));
    }
}
