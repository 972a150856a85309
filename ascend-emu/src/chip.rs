//! Cores and caches of the chips that the emulator reports. Operators do not depend on them.
//!
//! The numbers are those of CANN's platform files, `data/platform_config/<chip>.ini` of the toolkit, section `SoCInfo`:
//! `cube_core_cnt` (`ai_core_cnt` in files without it), `vector_core_cnt`, `ai_cpu_cnt` and `l2_size`.

use ascend_spec::Soc;

/// Cores and cache of a chip.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Chip {
    /// Cube cores, which multiply matrices; AI cores on chips that do not separate cube from vector cores.
    pub cube_cores: u32,
    /// Vector cores.
    pub vector_cores: u32,
    /// AI CPUs: general-purpose cores that operators may use.
    pub cpu_cores: u32,
    /// Bytes of the second-level cache.
    pub cache: i64,
}

/// Bytes of a mebibyte.
const MIB: i64 = 1 << 20;

/// The chips by their names without `Ascend`: cube cores, vector cores, processors, mebibytes of cache.
const CHIPS: &[(&str, u32, u32, u32, i64)] = &[
    ("910B1", 24, 48, 6, 192),
    ("910B2", 24, 48, 6, 192),
    ("910B2C", 24, 48, 6, 192),
    ("910B3", 20, 40, 6, 192),
    ("910B4", 20, 40, 6, 96),
    ("910B4-1", 20, 40, 6, 168),
    ("910_9362", 20, 40, 6, 168),
    ("910_9363", 20, 40, 6, 168),
    ("910_9372", 20, 40, 6, 192),
    ("910_9381", 24, 48, 6, 192),
    ("910_9382", 24, 48, 6, 192),
    ("910_9391", 24, 48, 6, 192),
    ("910_9392", 24, 48, 6, 192),
    ("950DT_950x", 8, 16, 5, 32),
    ("950DT_950y", 8, 16, 5, 32),
    ("950DT_9571", 28, 56, 7, 128),
    ("950DT_9572", 28, 56, 7, 128),
    ("950DT_9573", 28, 56, 5, 112),
    ("950DT_9574", 28, 56, 5, 112),
    ("950DT_9575", 28, 56, 7, 128),
    ("950DT_9576", 28, 56, 7, 128),
    ("950DT_9577", 28, 56, 5, 112),
    ("950DT_9578", 28, 56, 5, 112),
    ("950DT_9581", 32, 64, 6, 128),
    ("950DT_9582", 32, 64, 6, 128),
    ("950DT_9583", 32, 64, 7, 112),
    ("950DT_9584", 32, 64, 7, 112),
    ("950DT_9585", 32, 64, 6, 128),
    ("950DT_9586", 32, 64, 6, 128),
    ("950DT_9587", 32, 64, 7, 112),
    ("950DT_9588", 32, 64, 7, 112),
    ("950DT_9591", 36, 72, 6, 128),
    ("950DT_9592", 36, 72, 6, 128),
    ("950DT_9595", 36, 72, 6, 128),
    ("950DT_9596", 36, 72, 6, 128),
    ("950DT_95A1", 36, 72, 6, 128),
    ("950DT_95A2", 36, 72, 6, 128),
    ("950PR_950z", 4, 8, 5, 16),
    ("950PR_9579", 28, 56, 7, 128),
    ("950PR_957b", 28, 56, 5, 112),
    ("950PR_957c", 28, 56, 5, 112),
    ("950PR_957d", 28, 56, 5, 96),
    ("950PR_9589", 32, 64, 6, 128),
    ("950PR_958b", 32, 64, 7, 112),
    ("950PR_9599", 36, 72, 6, 128),
    ("310P1", 10, 8, 8, 16),
    ("310P3", 8, 7, 7, 16),
    ("310P5", 8, 7, 8, 16),
    ("310P7", 8, 7, 8, 16),
    ("310B1", 1, 1, 4, 4),
    ("310B2", 1, 1, 4, 4),
    ("310B3", 1, 1, 4, 4),
    ("310B4", 1, 1, 4, 4),
    ("910A", 32, 0, 4, 32),
    ("910ProA", 32, 0, 4, 32),
    ("910ProB", 30, 0, 4, 32),
    ("910PremiumA", 32, 0, 4, 32),
];

impl Chip {
    fn by_name(name: &str) -> Option<Self> {
        let name = name.strip_prefix("Ascend")?;
        let mut chips = CHIPS.iter();
        let &(_, cube_cores, vector_cores, cpu_cores, cache) =
            chips.find(|(known, ..)| known.eq_ignore_ascii_case(name))?;
        Some(Chip {
            cube_cores,
            vector_cores,
            cpu_cores,
            cache: cache * MIB,
        })
    }

    /// The chip with a name. An unknown name stands for the product's most common chip.
    pub(crate) fn named(name: &str, soc: Soc) -> Self {
        let known = Chip::by_name(name).or_else(|| Chip::by_name(soc.chip_name()));
        known.unwrap_or(Chip {
            cube_cores: 0,
            vector_cores: 0,
            cpu_cores: 0,
            cache: 0,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_product_has_a_chip_and_no_name_stands_twice() {
        for soc in [
            Soc::AtlasA2,
            Soc::AtlasA3,
            Soc::Ascend950,
            Soc::AtlasInference,
            Soc::AtlasTraining,
            Soc::Atlas200I500A2,
        ] {
            assert!(Chip::by_name(soc.chip_name()).is_some(), "{soc}");
        }
        for (at, (name, ..)) in CHIPS.iter().enumerate() {
            assert!(CHIPS.iter().skip(at + 1).all(|(other, ..)| name != other));
            assert!(Soc::from_name(&format!("Ascend{name}")).is_some(), "{name}");
        }
    }

    #[test]
    fn a_chip_of_an_unknown_name_is_that_of_its_product() {
        let chip = |name| Chip::named(name, Soc::AtlasA2);
        assert_eq!(chip("Ascend910B1").cube_cores, 24);
        assert_eq!(chip("Ascend910B"), chip("Ascend910B3"));
    }
}
