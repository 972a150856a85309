//! Products: which chip family a name belongs to.

use crate::Cann;
use std::fmt;

/// A chip family, as far as the operators tell families apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Soc {
    /// Atlas A2 training and inference (`Ascend910B1` .. `Ascend910B4-1`).
    AtlasA2,
    /// Atlas A3 training and inference (`Ascend910_93..`).
    AtlasA3,
    /// Ascend 950PR and 950DT.
    Ascend950,
    /// Atlas inference series (`Ascend310P..`).
    AtlasInference,
    /// Atlas training series (`Ascend910A`, `Ascend910ProA`, ...).
    AtlasTraining,
    /// Atlas 200I/500 A2 inference (`Ascend310B..`).
    Atlas200I500A2,
}

impl Soc {
    /// Whether two products have the same kernels and checks, as Atlas A2 and A3 do.
    pub fn is_kin(self, other: Self) -> bool {
        let shared = |soc| matches!(soc, Soc::AtlasA2 | Soc::AtlasA3);
        self == other || (shared(self) && shared(other))
    }

    /// The forms of the names that [`Soc::from_name`] knows, for messages: `x` is a letter or a digit.
    pub const NAME_FORMS: &str = "Ascend910B1 to Ascend910B4, Ascend910_93xx, Ascend950PR_95xx, Ascend950DT_95xx, \
                                  Ascend310P1 to Ascend310P9, Ascend310B1 to Ascend310B9, Ascend910A, Ascend910ProA";

    /// The family of a chip name as `aclrtGetSocName` returns it, or `None` for a name of no known form. A family's
    /// name without a chip's suffix, such as `Ascend910B`, is also known.
    ///
    /// ```
    /// use ascend_spec::Soc;
    ///
    /// assert_eq!(Soc::from_name("Ascend910B2C"), Some(Soc::AtlasA2));
    /// assert_eq!(Soc::from_name("Ascend9500000"), None);
    /// ```
    pub fn from_name(name: &str) -> Option<Self> {
        let chip = name.trim().strip_prefix("Ascend")?;
        let is = |family: &str, is_known: fn(&str) -> bool| {
            let rest = chip.strip_prefix(family);
            rest.is_some_and(|rest| rest.is_empty() || is_known(rest))
        };
        match true {
            _ if is("910_93", is_bin) => Some(Soc::AtlasA3),
            _ if is("910B", is_variant) => Some(Soc::AtlasA2),
            _ if is("950", is_package) => Some(Soc::Ascend950),
            _ if is("310P", is_variant) => Some(Soc::AtlasInference),
            _ if is("310B", is_variant) => Some(Soc::Atlas200I500A2),
            _ if is("910", is_grade) => Some(Soc::AtlasTraining),
            _ => None,
        }
    }

    /// The releases of CANN that know the product, oldest first.
    pub fn releases(self) -> impl Iterator<Item = Cann> {
        Cann::ALL.into_iter().filter(move |&cann| self.is_known_to(cann))
    }

    /// Whether a release knows the product.
    pub(crate) fn is_known_to(self, cann: Cann) -> bool {
        self != Soc::Ascend950 || cann >= Cann::V9_0
    }

    /// A chip of the product, by the name that `aclrtGetSocName` returns for it.
    pub const fn chip_name(self) -> &'static str {
        match self {
            Soc::AtlasA2 => "Ascend910B3",
            Soc::AtlasA3 => "Ascend910_9391",
            Soc::Ascend950 => "Ascend950PR_9599",
            Soc::AtlasInference => "Ascend310P3",
            Soc::AtlasTraining => "Ascend910A",
            Soc::Atlas200I500A2 => "Ascend310B1",
        }
    }

    /// The product's name.
    pub const fn name(self) -> &'static str {
        match self {
            Soc::AtlasA2 => "Atlas A2",
            Soc::AtlasA3 => "Atlas A3",
            Soc::Ascend950 => "Ascend 950",
            Soc::AtlasInference => "Atlas inference series (310P)",
            Soc::AtlasTraining => "Atlas training series (910A)",
            Soc::Atlas200I500A2 => "Atlas 200I/500 A2",
        }
    }
}

impl fmt::Display for Soc {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Whether `rest` is two letters or digits, such as `91` in `Ascend910_9391`.
fn is_bin(rest: &str) -> bool {
    rest.len() == 2 && rest.bytes().all(|byte| byte.is_ascii_alphanumeric())
}

/// Whether `rest` is a digit, perhaps with a letter or with a second digit after a dash: `3`, `2C`, `4-1`.
fn is_variant(rest: &str) -> bool {
    match rest.as_bytes() {
        [b'1'..=b'9'] => true,
        [b'1'..=b'9', letter] => letter.is_ascii_uppercase(),
        [b'1'..=b'9', b'-', digit] => digit.is_ascii_digit(),
        _ => false,
    }
}

/// Whether `rest` is `PR` or `DT`, perhaps with a chip of the 95 series: `PR_9599`.
fn is_package(rest: &str) -> bool {
    let chip = rest.strip_prefix("PR").or_else(|| rest.strip_prefix("DT"));
    chip.is_some_and(|chip| chip.is_empty() || chip.strip_prefix("_95").is_some_and(is_bin))
}

/// Whether `rest` is `A`, `ProA`, `PremiumA` or the like.
fn is_grade(rest: &str) -> bool {
    matches!(rest, "A" | "ProA" | "ProB" | "PremiumA" | "PremiumB")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_find_their_family() {
        for (name, soc) in [
            ("Ascend910B3", Some(Soc::AtlasA2)),
            ("Ascend910B4-1", Some(Soc::AtlasA2)),
            ("Ascend910_9391", Some(Soc::AtlasA3)),
            ("Ascend950PR_9599", Some(Soc::Ascend950)),
            ("Ascend310P3", Some(Soc::AtlasInference)),
            ("Ascend910ProA", Some(Soc::AtlasTraining)),
            ("Ascend310B1", Some(Soc::Atlas200I500A2)),
            ("Ascend910B", Some(Soc::AtlasA2)),
            ("Ascend910B2C", Some(Soc::AtlasA2)),
            ("Ascend910_9382", Some(Soc::AtlasA3)),
            ("Ascend950", Some(Soc::Ascend950)),
            ("Ascend950DT_957b", Some(Soc::Ascend950)),
            (" Ascend910B3\n", Some(Soc::AtlasA2)),
            ("Ascend910PremiumA", Some(Soc::AtlasTraining)),
            ("Kunpeng920", None),
            ("Ascend9500000", None),
            ("Ascend950XY_9599", None),
            ("Ascend950PR_95990", None),
            ("Ascend910B0", None),
            ("Ascend910B33", None),
            ("Ascend910_93", Some(Soc::AtlasA3)),
            ("Ascend910_93917", None),
            ("Ascend910_9\u{e9}", None),
            ("Ascend910junk", None),
            ("Ascend310PX", None),
            ("Ascend", None),
            ("", None),
        ] {
            assert_eq!(Soc::from_name(name), soc, "{name}");
        }
    }
}
