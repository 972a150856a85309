//! The product and the release that a text names.

use ascend_attention::spec::{Cann, Release, Soc};

use super::borders::after_words;

/// The product, by the name of a chip in any case, or by that of its series.
pub(super) fn soc<'a>(
    names: impl Iterator<Item = &'a str>,
    in_order: impl Iterator<Item = &'a str> + Clone,
) -> Option<Soc> {
    let chip = names.into_iter().find_map(|name| {
        let upper = name.to_uppercase();
        let chip = upper.strip_prefix("ASCEND").unwrap_or(&upper);
        // "910" alone may be any of the series, and "950" any number.
        let is_chip = chip.starts_with("910B") || chip.starts_with("910_93") || chip.starts_with("310");
        let is_named = upper.len() > chip.len();
        let soc = Soc::from_name(&format!("Ascend{chip}"));
        soc.filter(|_| is_chip || is_named && chip != "910")
    });
    let series = || {
        let mut pairs = in_order.clone().zip(in_order.clone().skip(1));
        pairs.find_map(|pair| match pair {
            ("Atlas", "A2") => Some(Soc::AtlasA2),
            ("Atlas", "A3") => Some(Soc::AtlasA3),
            ("Ascend", "950") => Some(Soc::Ascend950),
            _ => None,
        })
    };
    chip.or_else(series)
}

/// The release that stands behind the name of the toolkit: `CANN 9.1`, `CANN version: 9.1.0`.
pub(super) fn cann(text: &str) -> Option<Cann> {
    const FILLERS: [char; 7] = [' ', ':', '=', '-', '_', '"', '\''];
    let upper = text.to_uppercase();
    let version = |rest: &str| {
        let rest = rest.trim_start_matches(FILLERS);
        let rest = ["VERSION", "TOOLKIT", "V"].iter().find_map(|word| rest.strip_prefix(word)).unwrap_or(rest);
        let rest = rest.trim_start_matches(FILLERS);
        let end = rest.find(|c: char| !(c.is_ascii_digit() || c == '.'));
        match Cann::of_version(&rest[..end.unwrap_or(rest.len())])? {
            Release::Known(cann) => Some(cann),
            _ => None,
        }
    };
    after_words(&upper, "CANN*").find_map(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn product(text: &str) -> Option<Soc> {
        let names = || text.split(' ');
        soc(names(), names())
    }

    #[test]
    fn products_are_read_by_chip_and_by_series() {
        assert_eq!(product("on Ascend910_9391 910"), Some(Soc::AtlasA3));
        assert_eq!(product("| 0 910B3 |"), Some(Soc::AtlasA2));
        assert_eq!(product("on Atlas A2"), Some(Soc::AtlasA2));
        for text in ["910 950 rows", "Ascend910", "310 tokens"] {
            assert_eq!(product(text), None, "{text}");
        }
    }

    #[test]
    fn releases_are_read_behind_the_name_of_the_toolkit() {
        for text in ["CANN 9.1.0 on", "cann version: 9.1.0.B050", "image-cann9.1", "Ascend-cann-toolkit_9.1.0"] {
            assert_eq!(cann(text), Some(Cann::V9_1), "{text}");
        }
        for text in ["SCANN 9.1", "it cannot 9.1", "CANN is out", "cann"] {
            assert_eq!(cann(text), None, "{text}");
        }
    }
}
