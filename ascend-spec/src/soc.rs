//! Products: which chip family a name belongs to.

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

    /// The family of a chip name as `aclrtGetSocName` gives it, or `None` for a name of no known family.
    pub fn from_name(name: &str) -> Option<Self> {
        let rest = name.trim().strip_prefix("Ascend")?;
        // The longest prefixes first: 910B and 910_93 both begin as 910 does.
        const FAMILIES: [(&str, Soc); 6] = [
            ("910_93", Soc::AtlasA3),
            ("910B", Soc::AtlasA2),
            ("950", Soc::Ascend950),
            ("310P", Soc::AtlasInference),
            ("310B", Soc::Atlas200I500A2),
            ("910", Soc::AtlasTraining),
        ];
        FAMILIES
            .iter()
            .find(|(prefix, _)| rest.starts_with(prefix))
            .map(|&(_, soc)| soc)
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
            ("Kunpeng920", None),
            ("", None),
        ] {
            assert_eq!(Soc::from_name(name), soc, "{name}");
        }
    }
}
