//! The words of a message or of a rule, in one vocabulary.

/// Words that stand for others: CANN's messages, PyTorch's arguments and the rules here name the same in different
/// ways.
/// Letters are the axes of the layouts: T the packed rows, D the head dimension, Sq and Skv rows and keys.
const SAME: [(&str, &str); 67] = [
    ("attn", "atten"),
    ("attention", "atten"),
    ("attenmask", "atten mask"),
    ("sequence", "seq"),
    ("seqence", "seq"),
    ("seqlen", "seq"),
    ("length", "seq"),
    ("lens", "seq"),
    ("len", "seq"),
    ("qlen", "seq query"),
    ("kvlen", "seq key"),
    ("dimension", "dim"),
    ("dimnum", "axis"),
    ("rank", "axis"),
    ("axe", "axis"),
    ("batchsize", "batch"),
    ("blocksize", "block size"),
    ("blocktable", "block paged"),
    ("dtype", "type"),
    ("datatype", "type"),
    ("element", "entry"),
    ("entrie", "entry"),
    ("entries", "entry"),
    ("pa", "paged cache"),
    ("page", "paged cache"),
    ("paged", "paged cache"),
    ("paging", "paged cache"),
    ("table", "paged"),
    ("kv", "key"),
    ("q", "query"),
    ("t", "row"),
    ("s", "row"),
    ("d", "dim"),
    ("sq", "row"),
    ("skv", "key"),
    ("token", "row"),
    ("tnd", "tnd packed"),
    ("ntd", "ntd packed"),
    ("varlen", "packed"),
    ("cu", "cumulative"),
    ("aligned", "multiple"),
    ("align", "multiple"),
    ("divided", "divide"),
    ("divisible", "divide"),
    ("larger", "most"),
    ("bigger", "most"),
    ("greater", "most"),
    ("exceed", "most"),
    ("above", "most"),
    ("max", "most"),
    ("maximum", "most"),
    ("range", "most"),
    ("less", "least"),
    ("smaller", "least"),
    ("below", "least"),
    ("quantised", "quant"),
    ("quantized", "quant"),
    ("quantisation", "quant"),
    ("precise", "precision"),
    ("soc", "product"),
    ("chip", "product"),
    ("fp", "float"),
    ("bfloat", "bf"),
    ("stride", "contiguou"),
    ("strided", "contiguou"),
    ("num", "number"),
    ("count", "number"),
];

/// Numbers that rules spell out.
const NUMBERS: [(&str, &str); 5] = [("one", "1"), ("two", "2"), ("three", "3"), ("four", "4"), ("five", "5")];

/// Words that say nothing of a call.
const COMMON: &str = "the and for with that this not must should shall when but are was has have only its from get \
                      check can cannot func file line cpp error failed aicore fail tiling op input tensor value \
                      equal support supported unsupported invalid be is of to in a or by as on do ret enable \
                      enabled situation got it where which than call case process kernel launch run executor \
                      option info parameter reason shape_of report same all each so at an code npu they them no \
                      without";

/// Whether a word is a number.
pub(super) fn is_number(word: &str) -> bool {
    word.chars().all(|c| c.is_ascii_digit())
}

/// Whether a word names a layout or a product: it says which calls a message is about, and not what is wrong.
pub(super) fn is_circumstance(word: &str) -> bool {
    ["tnd", "ntd", "packed", "layout", "bsh", "bsnd", "bnsd", "atla", "ascend", "product"].contains(&word)
}

/// The words that stand side by side, as one: names of parameters among them.
pub(super) fn pairs(words: &[String]) -> impl Iterator<Item = String> {
    let pairs = words.windows(2);
    pairs.filter(|pair| !pair.iter().any(|word| is_circumstance(word))).map(|pair| pair.join(" "))
}

/// The words of a line in lower case: names in camel and snake case are taken apart, plurals are singular, and words
/// that mean the same are one.
pub(super) fn words(line: &str) -> Vec<String> {
    let parts = parts(&line.replace("'s ", " "));
    let mut words = Vec::new();
    let is_common = |word: &str| COMMON.split(' ').any(|common| common == word);
    for (at, part) in parts.iter().enumerate() {
        if is_common(part) {
            continue;
        }
        let singular = match part.strip_suffix('s') {
            Some(one) if one.len() > 2 && !one.ends_with('s') => one,
            _ => part,
        };
        let table = SAME.iter().chain(&NUMBERS);
        let same = table.clone().find(|(other, _)| *other == singular || *other == part);
        let known = same.map_or(singular, |(_, known)| known);
        let is = |at: Option<usize>, negations: &[&str]| {
            let word = at.and_then(|at| parts.get(at));
            word.is_some_and(|word| negations.contains(&word.as_str()))
        };
        let is_absent = is(at.checked_sub(1), &["no", "not", "without"]) || is(Some(at + 1), &["not"]);
        let is_required = is(at.checked_sub(1), &["be"]) && is(at.checked_sub(2), &["should", "must"]);
        let known = match known {
            // What has to be larger is too small.
            "most" if is_required => "least",
            "least" if is_required => "most",
            // What a message is not about has a word of its own.
            "paged cache" if is_absent => "unpaged",
            "quant" if is_absent => "unquant",
            known => known,
        };
        words.extend(known.split(' ').map(str::to_owned));
    }
    words.retain(|word| !is_common(word));
    words
}

/// The parts of the names of a line, in lower case.
fn parts(line: &str) -> Vec<String> {
    let letters: Vec<char> = line.chars().collect();
    let mut parts: Vec<String> = Vec::new();
    let mut before = ' ';
    for (at, &c) in letters.iter().enumerate() {
        let next_is_small = letters.get(at + 1).is_some_and(|c| c.is_lowercase());
        let begins = c.is_uppercase() && (before.is_lowercase() || next_is_small)
            || c.is_ascii_digit() != before.is_ascii_digit()
            || !before.is_alphanumeric();
        if c.is_alphanumeric() {
            match parts.last_mut() {
                Some(part) if !begins => part.extend(c.to_lowercase()),
                _ => parts.push(c.to_lowercase().collect()),
            }
        }
        before = c;
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(words("actualSequenceLengthQ(5)"), ["actual", "seq", "seq", "query", "5"]);
        assert_eq!(words("numKVHeads"), ["number", "key", "head"]);
        assert_eq!(words("atten_mask: heads"), ["atten", "mask", "head"]);
        assert_eq!(words("the key's heads, innerPrecise"), ["key", "head", "inner", "precision"]);
        assert_eq!(words("é\u{0}😀"), ["é"]);
    }

    #[test]
    fn bounds_that_are_required_are_told_from_those_that_are_broken() {
        for text in ["heads should be less than", "heads must be smaller", "heads exceed", "heads should not be larger"]
        {
            assert_eq!(words(text), ["head", "most"], "{text}");
        }
        for text in ["heads must be bigger or equal", "heads are less than"] {
            assert_eq!(words(text), ["head", "least"], "{text}");
        }
    }

    #[test]
    fn what_is_not_quantised_is_no_word_of_quantisation() {
        assert_eq!(words("NO_QUANT: block_size"), ["unquant", "block", "size"]);
        assert_eq!(words("PA not enabled"), ["unpaged"]);
        assert_eq!(words("quantised keys"), ["quant", "key"]);
    }
}
