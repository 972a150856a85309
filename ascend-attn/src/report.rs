//! The report on a case, as text and as JSON.

use std::fmt;
use std::path::PathBuf;
use std::time::Duration;

use ascend_attention::case::{Comparison, Outcome, Verdict};
use serde::Serialize;
use serde_json::{Value, json};

/// The result of replaying one file.
#[derive(Default)]
pub(super) struct Report {
    pub(super) file: PathBuf,
    pub(super) stem: String,
    pub(super) name: String,
    /// The case's outcome, if it could be run.
    pub(super) outcome: Option<Outcome>,
    /// An error apart from the outcome: of reading, running or writing.
    pub(super) failure: Option<String>,
    /// Why the case was not run: it is for another device.
    pub(super) skipped: Option<String>,
    /// The note of a recorded case.
    pub(super) note: String,
    pub(super) elapsed: Duration,
}

/// The word for a case's result.
#[derive(Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Passed,
    Failed,
    Unsupported,
    Skipped,
    Computed,
}

impl Report {
    fn word(&self) -> Word {
        match self.outcome.as_ref().map(|outcome| &outcome.verdict) {
            _ if self.failure.is_some() => Word::Failed,
            _ if self.skipped.is_some() => Word::Skipped,
            Some(Verdict::Passed) => Word::Passed,
            Some(Verdict::Computed) => Word::Computed,
            Some(Verdict::Unsupported(_)) => Word::Unsupported,
            Some(_) | None => Word::Failed,
        }
    }

    /// Why the case failed, is not supported, or was not run.
    fn reason(&self) -> Option<String> {
        match (self.failure.as_ref().or(self.skipped.as_ref()), self.outcome.as_ref().map(|outcome| &outcome.verdict)) {
            (Some(failure), _) => Some(failure.clone()),
            (None, Some(Verdict::Failed { reason })) => Some(reason.clone()),
            (None, Some(Verdict::Unsupported(unsupported))) => Some(unsupported.given.clone()),
            _ => None,
        }
    }

    fn comparisons(&self) -> &[Comparison] {
        self.outcome.as_ref().map_or(&[], |outcome| &outcome.comparisons)
    }

    /// One line; names are padded to `width`.
    pub(super) fn text(&self, width: usize) -> String {
        let milliseconds = self.elapsed.as_secs_f64() * 1e3;
        let mut line = format!("{:<width$}  ", self.stem);
        line += &match self.word() {
            Word::Passed => format!("pass  {}", self.errors()),
            Word::Failed => format!("FAIL  {}", self.reason().unwrap_or_default()),
            Word::Unsupported => format!("unsupported: {}", self.reason().unwrap_or_default()),
            Word::Skipped => format!("skipped: {}", self.reason().unwrap_or_default()),
            Word::Computed => format!("computed  {}", self.shapes()),
        };
        line += &format!("  ({milliseconds:.1} ms)");
        let lints: Vec<&str> =
            self.outcome.iter().flat_map(|outcome| &outcome.lints).map(|lint| lint.rule.id).collect();
        if !lints.is_empty() {
            line += &format!("  lints: {}", lints.join(", "));
        }
        if self.word() == Word::Failed && !self.note.is_empty() {
            // A file may contain any text.
            line += &format!("\n    note: {}", self.note.escape_debug());
        }
        line
    }

    /// The worst error of each output against its tolerance.
    fn errors(&self) -> String {
        let mut errors: Vec<String> = Vec::new();
        for comparison in self.comparisons() {
            if let Some(worst) = comparison.worst {
                errors.push(format!(
                    "{} worst error {:.2e} of {:.2e} allowed",
                    comparison.output, worst.error, worst.tolerance
                ));
            }
        }
        match (errors.is_empty(), &self.outcome) {
            (true, Some(Outcome { refusal: Some(refusal), .. })) => {
                format!("refused as expected: {refusal}")
            }
            _ => errors.join(", "),
        }
    }

    fn shapes(&self) -> String {
        let outputs = self.outcome.iter().flat_map(|outcome| &outcome.outputs);
        let shapes: Vec<String> = outputs.map(|(name, tensor)| format!("{name} {tensor:?}")).collect();
        shapes.join(", ")
    }

    pub(super) fn json(&self) -> Value {
        let outcome = self.outcome.as_ref();
        json!({
            "file": self.file.to_string_lossy(),
            "name": self.name,
            "verdict": self.word(),
            "reason": self.reason(),
            "refusal": outcome.and_then(|outcome| outcome.refusal.as_ref()).map(ToString::to_string),
            "outputs": self.comparisons().iter().map(comparison).collect::<Vec<_>>(),
            "lints": outcome
                .iter()
                .flat_map(|outcome| &outcome.lints)
                .map(ToString::to_string)
                .collect::<Vec<_>>(),
            "milliseconds": self.elapsed.as_secs_f64() * 1e3,
        })
    }
}

fn comparison(compared: &Comparison) -> Value {
    json!({
        "output": compared.output,
        "compared": compared.compared,
        "unspecified": compared.unspecified,
        "outside": compared.outside,
        "worst": compared.worst.map(|worst| json!({
            "index": worst.index,
            "got": number(f64::from(worst.got)),
            "want": number(f64::from(worst.want)),
            "error": number(worst.error),
            "tolerance": number(worst.tolerance),
        })),
    })
}

/// A number with its noun.
pub(super) fn counted(number: usize, one: &str, several: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { several })
}

/// JSON has no infinities and no NaN: they become strings.
pub(super) fn number(value: f64) -> Value {
    match serde_json::Number::from_f64(value) {
        Some(number) => Value::Number(number),
        None => Value::String(value.to_string()),
    }
}

/// Counts of cases by result.
#[derive(Default, Serialize)]
pub(super) struct Tally {
    pub(super) passed: usize,
    pub(super) failed: usize,
    pub(super) unsupported: usize,
    pub(super) skipped: usize,
    pub(super) computed: usize,
}

impl Tally {
    pub(super) fn count(&mut self, report: &Report) {
        *match report.word() {
            Word::Passed => &mut self.passed,
            Word::Failed => &mut self.failed,
            Word::Unsupported => &mut self.unsupported,
            Word::Skipped => &mut self.skipped,
            Word::Computed => &mut self.computed,
        } += 1;
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} passed, {} failed", self.passed, self.failed)?;
        for (count, word) in [(self.unsupported, "unsupported"), (self.skipped, "skipped"), (self.computed, "computed")]
        {
            if count > 0 {
                write!(f, ", {count} {word}")?;
            }
        }
        Ok(())
    }
}
