//! Words that a text has as words: `fix: ` is in `; fix: `, and not in `prefix: `.

/// Whether a text has a word, or several, that no letter, digit or underscore continues on either side. A word with a
/// `*` at its end may go on there.
pub(super) fn has_word(text: &str, word: &str) -> bool {
    after_words(text, word).next().is_some()
}

/// What follows a word, at each place where a text has it as in [`has_word`].
pub(super) fn after_words<'t>(text: &'t str, word: &'t str) -> impl Iterator<Item = &'t str> {
    let stem = word.strip_suffix('*');
    let word = stem.unwrap_or(word);
    text.match_indices(word).filter_map(move |(at, _)| {
        let (before, after) = (&text[..at], &text[at + word.len()..]);
        let is_continued_before = joins(before.chars().next_back(), word.chars().next());
        let is_continued = stem.is_none() && joins(word.chars().next_back(), after.chars().next());
        (!is_continued_before && !is_continued).then_some(after)
    })
}

/// Whether two neighbours are parts of one word.
fn joins(one: Option<char>, other: Option<char>) -> bool {
    one.is_some_and(is_of_word) && other.is_some_and(is_of_word)
}

/// Whether a word, or the name of a function or an argument, may have a character.
pub(super) fn is_of_word(c: char) -> bool {
    c.is_alphanumeric() || c == '_'
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_word_is_no_word() {
        for (text, word) in [
            ("prefix: 4", "fix: "),
            ("by itself.", "self."),
            ("CANNOT 9.1", "CANN"),
            ("1507015, 5070150", "507015"),
            ("é_self.x", "self."),
            ("unHcclX", "Hccl*"),
        ] {
            assert!(!has_word(text, word), "{text}");
        }
        for (text, word) in [
            ("; fix: give 4", "fix: "),
            ("    self.impl", "self."),
            ("CANN:9.1", "CANN"),
            ("code:507015.", "507015"),
            ("prefix: fix: 1", "fix: "),
            ("error: HcclX", "Hccl*"),
        ] {
            assert!(has_word(text, word), "{text}");
        }
        assert_eq!(after_words("SCANN 1 CANN 2", "CANN").collect::<Vec<_>>(), [" 2"]);
    }
}
