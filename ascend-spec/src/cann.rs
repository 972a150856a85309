//! CANN releases, and the names that stand for them.

use std::fmt;
use std::str::FromStr;

/// A CANN release, as far as the contracts of the operators tell releases apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Cann {
    /// Releases 8.1 to 8.4. Only their headers are known; the checks are those of a development snapshot of late
    /// 2025, which equals no release and stands in for all of them.
    V8_1,
    /// 8.5.
    V8_5,
    /// 9.0.
    V9_0,
    /// 9.1.
    V9_1,
    /// 9.2, as a preview: no such release was seen. The contract is that of the operators' development branch in
    /// August 2026, the candidate of 9.2, and may change until the release.
    V9_2,
}

impl Cann {
    /// Every release, oldest first; previews are the last.
    pub const ALL: [Cann; 5] = [Cann::V8_1, Cann::V8_5, Cann::V9_0, Cann::V9_1, Cann::V9_2];

    /// The newest release whose contract is known, previews left out: what is assumed where nothing says which
    /// release it is.
    pub const NEWEST: Cann = Cann::V9_1;

    /// The release's name, `major.minor`.
    pub const fn name(self) -> &'static str {
        match self {
            Cann::V8_1 => "8.1",
            Cann::V8_5 => "8.5",
            Cann::V9_0 => "9.0",
            Cann::V9_1 => "9.1",
            Cann::V9_2 => "9.2",
        }
    }

    /// The version that a toolkit of the release states, by its numbers.
    pub const fn version(self) -> [u16; 3] {
        match self {
            Cann::V8_1 => [8, 1, 0],
            Cann::V8_5 => [8, 5, 0],
            Cann::V9_0 => [9, 0, 0],
            Cann::V9_1 => [9, 1, 0],
            Cann::V9_2 => [9, 2, 0],
        }
    }

    /// Whether the contract is that of a development branch ahead of its release, which may still change. Nobody has
    /// it unless a toolkit of that version is installed or the release is named.
    pub const fn is_preview(self) -> bool {
        match self {
            Cann::V8_1 | Cann::V8_5 | Cann::V9_0 | Cann::V9_1 => false,
            Cann::V9_2 => true,
        }
    }

    /// Returns the contract of the toolkit whose version is `version`, such as `8.5.0` or `9.0.RC1`: `None` for a
    /// text that does not begin with `major.minor`, and for releases before 8.1. The rest of the text is ignored,
    /// because toolkits name their versions freely. [`Cann::from_str`] reads what a user writes.
    ///
    /// ```
    /// use ascend_spec::{Cann, Release, Target};
    ///
    /// let release = |version| Cann::of_version(version);
    /// assert_eq!(release("8.3.RC1"), Some(Release::Known(Cann::V8_1)));
    /// assert_eq!(release("9.0.1"), Some(Release::Known(Cann::V9_0)));
    /// assert_eq!(release("9.2.0"), Some(Release::Known(Cann::V9_2)));
    /// assert_eq!(release("9.3.0"), Some(Release::Newer(Cann::NEWEST)));
    /// assert_eq!(release("7.0.0"), None);
    /// ```
    pub fn of_version(version: &str) -> Option<Release> {
        let mut numbers = version.trim().split('.');
        let major: u32 = numbers.next()?.parse().ok()?;
        let minor = numbers.next()?;
        let digits = minor.find(|c: char| !c.is_ascii_digit()).unwrap_or(minor.len());
        let minor: u32 = minor.get(..digits)?.parse().ok()?;
        match (major, minor) {
            (8, 1..=4) => Some(Release::Known(Cann::V8_1)),
            (8, 5..) => Some(Release::Known(Cann::V8_5)),
            (9, 0) => Some(Release::Known(Cann::V9_0)),
            (9, 1) => Some(Release::Known(Cann::V9_1)),
            (9, 2) => Some(Release::Known(Cann::V9_2)),
            (9.., _) => Some(Release::Newer(Cann::NEWEST)),
            _ => None,
        }
    }
}

impl FromStr for Cann {
    type Err = UnknownRelease;

    /// Parses a release that a user writes, in the forms of CANN's own names: `9.1`, `9.1.0`, `9.1.RC1`,
    /// `9.1.0.beta1`, `9.1.0-beta.1`, `9.1.T5`.
    ///
    /// # Errors
    /// [`UnknownRelease`] for other texts, and for releases whose contract is not known.
    fn from_str(text: &str) -> Result<Self, UnknownRelease> {
        let release = match Cann::of_version(text) {
            Some(Release::Known(cann)) if is_version(text.trim()) => Some(cann),
            _ => None,
        };
        release.ok_or_else(|| UnknownRelease { given: text.chars().take(UnknownRelease::MOST).collect() })
    }
}

/// Whether a text consists of numbers and the words of versions, beginning with two numbers: `9.1`,
/// `9.1.RC1.alpha002`.
fn is_version(text: &str) -> bool {
    /// The words that CANN's versions contain besides numbers.
    const WORDS: [&str; 12] = ["rc", "alpha", "beta", "t", "b", "c", "p", "spc", "sph", "hp", "patch", "dev"];
    // At most one number after a word: `RC1`, but not `1RC1RC1`.
    let is_word = |part: &str| {
        let word = part.trim_end_matches(|c: char| c.is_ascii_digit());
        word.is_empty() || WORDS.iter().any(|known| word.eq_ignore_ascii_case(known))
    };
    let mut parts = text.split(['.', '-']);
    let is_number = |part: &str| !part.is_empty() && part.bytes().all(|digit| digit.is_ascii_digit());
    let (Some(major), Some(minor)) = (parts.next(), parts.next()) else {
        return false;
    };
    // `8.5RC2` has no dot before the word.
    let word = minor.trim_start_matches(|c: char| c.is_ascii_digit());
    is_number(major) && minor.len() > word.len() && is_word(word) && parts.all(|part| !part.is_empty() && is_word(part))
}

/// The error for a text that names no release whose contract is known.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{given:?} is no release whose contract is known; allowed: {}, or a version of these such as 9.1.0 or 8.5.RC1",
    Cann::ALL.map(|cann| cann.to_string()).join(", ")
)]
pub struct UnknownRelease {
    /// The text, cut to 64 letters.
    pub given: String,
}

impl UnknownRelease {
    /// The text is cut to this number of letters.
    const MOST: usize = 64;
}

impl fmt::Display for Cann {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())?;
        match self.is_preview() {
            true => f.write_str(" preview"),
            false => Ok(()),
        }
    }
}

/// The contract for a toolkit's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Release {
    /// The contract is that of the release itself.
    Known(Cann),
    /// The release is newer than every known one: the contract of [`Cann::NEWEST`] stands in.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn releases_are_ordered_and_named() {
        assert!(Cann::ALL.is_sorted());
        let settled = Cann::ALL.into_iter().filter(|cann| !cann.is_preview());
        assert_eq!(settled.max(), Some(Cann::NEWEST));
        assert_eq!(Cann::V9_2.to_string(), "9.2 preview");
        for cann in Cann::ALL {
            let [major, minor, _] = cann.version();
            assert_eq!(format!("{major}.{minor}"), cann.name());
            assert_eq!(Cann::of_version(cann.name()), Some(Release::Known(cann)));
        }
    }

    #[test]
    fn releases_that_a_user_names_have_the_forms_of_versions() {
        for (text, cann) in [
            ("8.1", Some(Cann::V8_1)),
            ("8.3.RC1", Some(Cann::V8_1)),
            ("8.2.RC1.alpha002", Some(Cann::V8_1)),
            ("8.5.0.alpha001", Some(Cann::V8_5)),
            ("8.5RC2", Some(Cann::V8_5)),
            (" 9.0.0\n", Some(Cann::V9_0)),
            ("9.1", Some(Cann::V9_1)),
            ("9.1.0", Some(Cann::V9_1)),
            ("9.1.RC1", Some(Cann::V9_1)),
            ("9.1.0.beta1", Some(Cann::V9_1)),
            ("9.1.0-beta.1", Some(Cann::V9_1)),
            ("9.1.T5", Some(Cann::V9_1)),
            ("9.1.T5.0.B117", Some(Cann::V9_1)),
            ("9.1junk", None),
            ("9.1.junk", None),
            ("9.1.0 or so", None),
            ("9.1.RC1x", None),
            ("9.1.", None),
            ("9.1..0", None),
            ("9.1.0-", None),
            ("-9.1", None),
            ("9", None),
            ("9.2", Some(Cann::V9_2)),
            ("9.2.0", Some(Cann::V9_2)),
            ("9.2.RC1", Some(Cann::V9_2)),
            ("9.3", None),
            ("8.0.RC3", None),
            ("", None),
        ] {
            let read: Result<Cann, _> = text.parse();
            assert_eq!(read.clone().ok(), cann, "{text}");
            if let Err(error) = read {
                let message = error.to_string();
                assert!(message.contains("8.1, 8.5, 9.0, 9.1, 9.2 preview"), "{text}: {message}");
            }
        }
        let long = "9".repeat(1 << 16).parse::<Cann>().unwrap_err();
        assert!(long.to_string().len() < 300);
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
            ("9.2.0", Some(Known(Cann::V9_2))),
            ("9.3.0", Some(Newer(Cann::V9_1))),
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
