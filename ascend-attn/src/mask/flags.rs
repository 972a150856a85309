//! Which flags belong to which mask.

use clap::ValueEnum as _;

use super::{Arguments, Kind};
use crate::Stop;

/// Rows and keys of one sequence.
const DENSE: &[&str] = &["--sq", "--skv"];
/// Rows and keys of one sequence or of several.
const LENGTHS: &[&str] = &["--sq", "--skv", "--q-ends", "--kv-ends"];
/// Sizes of TriangleMix, which determine or name all its parts.
const TRIANGLE: &[&str] = &["--sink", "--window", "--last", "--prompt-len", "--preset"];

/// The flags that define a mask of this kind, in groups. Flags for what is done with the mask belong to every kind.
fn taken(kind: Kind) -> &'static [&'static [&'static str]] {
    match kind {
        Kind::Mode0 => &[LENGTHS, &["--pre", "--next", "--tensor"]],
        Kind::Mode1 => &[LENGTHS, &["--tensor"]],
        Kind::Mode2 | Kind::Mode3 | Kind::Causal | Kind::ChunkedPrefill => &[LENGTHS],
        Kind::Mode4 | Kind::Mode7 | Kind::Mode8 => &[LENGTHS, &["--pre", "--next"]],
        Kind::Mode5 | Kind::Mode6 | Kind::Prefix => &[LENGTHS, &["--prefix"]],
        Kind::SlidingWindow => &[DENSE, &["--window"]],
        Kind::Mla => &[DENSE],
        Kind::Mode9 | Kind::Tree => &[DENSE, &["--tree"]],
        Kind::Local => &[DENSE, &["--chunk"]],
        Kind::Triangle | Kind::Streaming | Kind::Last | Kind::Middle | Kind::Dense => &[DENSE, TRIANGLE],
    }
}

fn takes(kind: Kind, flag: &str) -> bool {
    taken(kind).iter().any(|group| group.contains(&flag))
}

impl Arguments {
    /// The given flags that define the mask.
    fn given(&self) -> impl Iterator<Item = &'static str> {
        [
            ("--sq", self.sq.is_some()),
            ("--skv", self.skv.is_some()),
            ("--pre", self.pre.is_some()),
            ("--next", self.next.is_some()),
            ("--window", self.window.is_some()),
            ("--sink", self.sink.is_some()),
            ("--last", self.last.is_some()),
            ("--prompt-len", self.prompt_len.is_some()),
            ("--preset", self.preset.is_some()),
            ("--prefix", !self.prefix.is_empty()),
            ("--chunk", self.chunk.is_some()),
            ("--q-ends", !self.q_ends.is_empty()),
            ("--kv-ends", !self.kv_ends.is_empty()),
            ("--tree", self.tree.is_some()),
            ("--tensor", self.tensor.is_some()),
        ]
        .into_iter()
        .filter_map(|(name, given)| given.then_some(name))
    }
}

/// Refuses flags that the mask does not use.
pub(super) fn belong(arguments: &Arguments, kind: Kind) -> Result<(), Stop> {
    let Some(flag) = arguments.given().find(|flag| !takes(kind, flag)) else {
        return Ok(());
    };
    let takers: Vec<String> =
        Kind::value_variants().iter().filter(|&&kind| takes(kind, flag)).map(|&kind| name(kind)).collect();
    Err(Stop::Trouble(format!(
        "{flag} does not belong to {}, which takes {}; {flag} belongs to {}",
        name(kind),
        taken(kind).concat().join(", "),
        takers.join(", ")
    )))
}

/// Refuses flags whose values follow from a case.
pub(super) fn of_case(arguments: &Arguments) -> Result<(), Stop> {
    match arguments.given().next() {
        None => Ok(()),
        Some(flag) => Err(Stop::Trouble(format!(
            "{flag} does not go with --case: the case says what its call sees; leave {flag} out, or name a KIND \
             instead of --case"
        ))),
    }
}

/// The name of a mask on the command line.
fn name(kind: Kind) -> String {
    let value = kind.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}
