//! What the text of a failed call names: operator, status, rules, and words.

use std::collections::BTreeSet;
use std::fmt;

use ascend_attention::spec::declared::DeclaredOperator;
use ascend_trianglemix::rules::every_rule;

/// CANN's statuses of refused calls, and their names.
const STATUSES: [(i32, &str); 6] = [
    (161_001, "ACLNN_ERR_PARAM_NULLPTR"),
    (161_002, "ACLNN_ERR_PARAM_INVALID"),
    (361_001, "ACLNN_ERR_RUNTIME_ERROR"),
    (561_002, "ACLNN_ERR_INNER_TILING_ERROR"),
    (561_003, "ACLNN_ERR_INNER_FIND_KERNEL_ERROR"),
    (561_103, "ACLNN_ERR_INNER_NULLPTR"),
];

/// What marks a line as a message of CANN or of this library, among those of a traceback.
const MARKS: [&str; 6] = ["[FUNC:", "[FILE:", "EZ9999", "E89999", "EZ1001", "fix: "];

/// What a text says of a failed call.
#[derive(Debug, Default)]
pub(super) struct Reading {
    /// The operator, without its version.
    pub(super) operator: Option<DeclaredOperator>,
    pub(super) statuses: Vec<i32>,
    /// Rules that the text names.
    pub(super) rules: Vec<&'static str>,
    /// The words of the messages, as [`words`] has them; none in a text that names neither operator nor status nor rule
    /// and has no message of CANN: another program failed then.
    pub(super) words: BTreeSet<String>,
}

impl Reading {
    pub(super) fn new(text: &str) -> Self {
        let names = || text.split(|c: char| !(c.is_alphanumeric() || c == '_' || c == '.'));
        let known: BTreeSet<&str> = names().map(|name| name.trim_matches('.')).collect();
        let statuses = STATUSES.iter().filter(|(status, name)| {
            known.contains(status.to_string().as_str()) || known.contains(name)
        });
        let rules = every_rule().map(|rule| rule.id);
        let of_cann: Vec<&str> = text.lines().filter(|line| is_message(line)).collect();
        let messages = match of_cann.is_empty() {
            true => text.lines().filter(|line| !is_frame(line)).collect(),
            false => of_cann.clone(),
        };
        let mut reading = Self {
            operator: operator(names()),
            statuses: statuses.map(|(status, _)| *status).collect(),
            rules: rules.filter(|id| known.contains(id)).collect(),
            words: BTreeSet::new(),
        };
        let names_none = reading.statuses.is_empty() && reading.rules.is_empty();
        if !of_cann.is_empty() || reading.operator.is_some() || !names_none {
            reading.words = messages.into_iter().flat_map(message_words).collect();
        }
        reading
    }
}

impl fmt::Display for Reading {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.operator {
            Some(operator) => f.write_str(operator.name())?,
            None => f.write_str("no operator")?,
        }
        for status in &self.statuses {
            write!(f, ", {status}")?;
            if let Some((_, name)) = STATUSES.iter().find(|(known, _)| known == status) {
                write!(f, " ({name})")?;
            }
        }
        Ok(())
    }
}

fn is_message(line: &str) -> bool {
    MARKS.iter().any(|mark| line.contains(mark))
}

/// The words of a message, without the process and code in front of it, the functions that it names, and its place in
/// CANN's source.
fn message_words(line: &str) -> Vec<String> {
    let text = line.split_once("): ").map_or(line, |(_, text)| text);
    let text = text.split_once("[FILE:").map_or(text, |(text, _)| text);
    let names = text.split(|c: char| !(c.is_alphanumeric() || c == '_'));
    let names = names.filter(|name| of_function(name).is_none());
    names.flat_map(words).collect()
}

/// Whether a line is a frame of a traceback, which names files and functions and no arguments.
fn is_frame(line: &str) -> bool {
    line.contains("File \"") || line.trim_start().starts_with("Traceback") || line.contains("^^^")
}

/// The operator that is named most often, by CANN's function or by PyTorch's.
fn operator<'a>(names: impl Iterator<Item = &'a str> + Clone) -> Option<DeclaredOperator> {
    let count = |operator| {
        names
            .clone()
            .filter(|name| of_function(name) == Some(operator))
            .count()
    };
    let counts = DeclaredOperator::ALL
        .iter()
        .map(|&operator| (count(operator), operator));
    let most = counts
        .filter(|(count, _)| *count > 0)
        .max_by_key(|(count, _)| *count);
    most.map(|(_, operator)| operator)
}

/// The operator behind a function of CANN (`aclnn..`) or of torch_npu (`npu_..`).
pub(super) fn of_function(name: &str) -> Option<DeclaredOperator> {
    let cann = name.strip_prefix("aclnn");
    let torch = name.trim_start_matches('_').strip_prefix("npu_");
    let name = cann.or(torch)?;
    let ends = [
        "GetWorkspaceSize",
        "GetMaxWorkspaceSize",
        "_symint",
        "_out",
        "_get_max_workspace",
    ];
    let name = ends
        .into_iter()
        .fold(name, |name, end| name.strip_suffix(end).unwrap_or(name));
    let name = name.replace('_', "").to_lowercase();
    let versioned = name.trim_end_matches(|c: char| c.is_ascii_digit());
    let name = match versioned.strip_suffix('v') {
        Some(base) if versioned.len() < name.len() => base,
        _ => &name,
    };
    match name {
        "fusionattention" | "flashattentionvarlenscore" => {
            Some(DeclaredOperator::FlashAttentionScore)
        }
        "reshapeandcache" => Some(DeclaredOperator::ScatterPaKvCache),
        _ => {
            let mut all = DeclaredOperator::ALL.iter().copied();
            all.find(|operator| operator.name().replace('_', "").to_lowercase() == name)
        }
    }
}

/// Words that stand for the same in CANN's messages, in PyTorch's arguments and in the rules here.
const SAME: [(&str, &str); 21] = [
    ("attn", "atten"),
    ("attention", "atten"),
    ("attenmask", "mask"),
    ("blocktable", "table"),
    ("sequence", "seq"),
    ("seqlen", "seq"),
    ("length", "seq"),
    ("lens", "seq"),
    ("len", "seq"),
    ("dimension", "dim"),
    ("batchsize", "batch"),
    ("blocksize", "block"),
    ("dtype", "type"),
    ("datatype", "type"),
    ("element", "type"),
    ("pa", "table"),
    ("page", "table"),
    ("paged", "table"),
    ("cumulative", "last"),
    ("both", "together"),
    ("exist", "together"),
];

/// Words that say nothing of a call.
const COMMON: &str = "the and for with that this not must should shall when but are was has have only one its from get check \
                      func file line cpp error inner failed fail tiling op input tensor value equal support supported \
                      invalid be is of to in a or by as on";

/// The words of a line in lower case: names in camel and snake case are taken apart, plurals are singular, and words
/// that mean the same are one.
pub(super) fn words(line: &str) -> Vec<String> {
    let mut parts: Vec<String> = Vec::new();
    let mut before = ' ';
    for c in line.chars() {
        let begins = c.is_uppercase() && before.is_lowercase()
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
    let singular = |word: String| match word.strip_suffix('s') {
        Some(one) if one.len() > 2 && !one.ends_with('s') => one.to_owned(),
        _ => word,
    };
    let same = |word: String| match SAME.iter().find(|(other, _)| *other == word) {
        Some((_, known)) => (*known).to_owned(),
        None => word,
    };
    let parts = parts.into_iter().map(singular).map(same);
    parts
        .filter(|word| COMMON.split(' ').all(|common| common != word))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn functions_of_cann_and_of_pytorch_name_operators() {
        use DeclaredOperator::{FlashAttentionScore, FusedInferAttentionScore, ScatterPaKvCache};
        for (function, operator) in [
            (
                "aclnnFusedInferAttentionScoreV4",
                Some(FusedInferAttentionScore),
            ),
            (
                "aclnnFusedInferAttentionScoreV3GetWorkspaceSize",
                Some(FusedInferAttentionScore),
            ),
            (
                "npu_fused_infer_attention_score_v2",
                Some(FusedInferAttentionScore),
            ),
            (
                "npu_fused_infer_attention_score_out_symint",
                Some(FusedInferAttentionScore),
            ),
            (
                "aclnnFusedInferAttentionScoreV4GetMaxWorkspaceSize",
                Some(FusedInferAttentionScore),
            ),
            (
                "_npu_fused_infer_attention_score_get_max_workspace",
                Some(FusedInferAttentionScore),
            ),
            (
                "_npu_fusion_attention_v3_get_max_workspace",
                Some(FlashAttentionScore),
            ),
            ("npu_fusion_attention", Some(FlashAttentionScore)),
            ("aclnnFlashAttentionVarLenScore", Some(FlashAttentionScore)),
            ("_npu_reshape_and_cache", Some(ScatterPaKvCache)),
            ("aclnnMatmul", None),
            ("FusedInferAttentionScore", None),
        ] {
            assert_eq!(of_function(function), operator, "{function}");
        }
    }

    #[test]
    fn names_are_taken_apart() {
        assert_eq!(
            words("actualSequenceLengthQ(5)"),
            ["actual", "seq", "seq", "q", "5"]
        );
        assert_eq!(words("atten_mask: heads"), ["atten", "mask", "head"]);
        assert_eq!(words("é\u{0}😀"), ["é"]);
    }

    #[test]
    fn a_text_of_another_program_has_no_words() {
        for text in [
            "RuntimeError: out of memory. Tried to allocate 2.00 GiB",
            "KeyError: 'block_tables'",
        ] {
            assert!(Reading::new(text).words.is_empty(), "{text}");
        }
        assert!(!Reading::new("561002: the block table").words.is_empty());
    }

    #[test]
    fn frames_of_a_traceback_say_nothing_where_there_are_messages() {
        let text = "  File \"mask.py\", line 2, in head_dim\nEZ9999: the scale\n561002 aclnnIncreFlashAttentionV4";
        let reading = Reading::new(text);
        assert_eq!(reading.statuses, [561_002]);
        assert_eq!(
            reading.operator,
            Some(DeclaredOperator::IncreFlashAttention)
        );
        assert!(!reading.words.contains("mask") && reading.words.contains("scale"));
    }
}
