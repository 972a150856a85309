//! Public reports that hardware behaves differently, by the rules about the same calls.

use crate::rule::Rule;

/// Rules, and the part of the book's page "Where hardware is known to differ" that is about their calls.
const HARDWARE: [(&str, &str); 13] = [
    ("atten_mask.full", "one-mask-row-for-all"),
    ("atten_mask.full_shape", "one-mask-row-for-all"),
    ("atten_mask.compressed_shape_decode", "one-mask-row-for-all"),
    ("atten_mask.prefix_decode", "one-mask-row-for-all"),
    ("sparse_mode.one_row", "one-mask-row-for-all"),
    ("sparse_mode.single_row", "one-mask-row-for-all"),
    ("tokens.without_mask", "one-mask-row-for-all"),
    ("pse_shift.shape", "one-mask-row-for-all"),
    ("pse_shift.one_row", "one-mask-row-for-all"),
    ("packed.q_total", "vision-towers-tnd-mode-0-no-mask"),
    ("block_size.prefill", "pages-of-16-tokens"),
    ("block_size.decode", "pages-of-16-tokens"),
    ("block_size.unified", "pages-of-16-tokens"),
];

impl Rule {
    /// Returns where the book lists public reports of hardware that treats calls under this rule differently: a page
    /// of `docs/src`, and a part of it.
    pub fn hardware_reports(&self) -> Option<String> {
        let mut known = HARDWARE.into_iter();
        let (_, part) = known.find(|(id, _)| *id == self.id)?;
        Some(format!("hardware.md#{part}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::every_rule;

    #[test]
    fn reports_are_about_rules_that_are_there() {
        for (id, part) in HARDWARE {
            let mut rules = every_rule().filter(|rule| rule.id == id);
            let reports = rules.next().unwrap().hardware_reports().unwrap();
            assert_eq!(reports, format!("hardware.md#{part}"));
        }
    }
}
