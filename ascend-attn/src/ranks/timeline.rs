//! Who waits for whom: a row for each rank, time from left to right, the parts of a step in colours.

use std::time::Duration;

use super::divided::{PARTS, RankSteps};
use crate::drawing::{Anchor, Box, Colour, Scene, Size, Text};

/// Dots of the time axis.
const WIDTH: u32 = 900;
/// Dots left of it, for the names of ranks, and right of it, for the last number.
const SIDES: [u32; 2] = [80, 60];
/// Dots of the title, of a row, and of the axis with the legend.
const TITLE: u32 = 44;
const ROW: u32 = 28;
const LEGEND: u32 = 70;

/// The colours of [`PARTS`].
const COLOURS: [Colour; PARTS.len()] =
    [[0xaa, 0x33, 0x77], [0x66, 0xcc, 0xee], [0x44, 0x77, 0xaa], [0xee, 0x66, 0x77], [0x22, 0x88, 0x33]];
const WAITING: Colour = [0xe4, 0xe7, 0xeb];
const LINE: Colour = [0x33, 0x33, 0x33];

/// The parts in which ranks meet.
const MEETINGS: [&str; 2] = ["gather", "exchange"];

/// A stretch of time of a rank.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Stretch {
    /// A place in [`PARTS`], or waiting for the last rank to come.
    part: Option<usize>,
    start: Duration,
    end: Duration,
}

/// What each rank does in a step. The ranks begin together; in a part in which they meet, a rank waits until the last
/// one has come.
fn stretches(ranks: &[[Duration; PARTS.len()]]) -> Vec<Vec<Stretch>> {
    let starts = |times: &[Duration; PARTS.len()], part: usize| times[..part].iter().sum::<Duration>();
    let last_start = |part: usize| ranks.iter().map(|times| starts(times, part)).max().unwrap_or_default();
    let of_rank = |times: &[Duration; PARTS.len()]| {
        let mut stretches = Vec::new();
        for (part, name) in PARTS.iter().enumerate() {
            let start = starts(times, part);
            let end = start + times[part];
            let met = if MEETINGS.contains(name) { last_start(part).clamp(start, end) } else { start };
            stretches.push(Stretch { part: None, start, end: met });
            stretches.push(Stretch { part: Some(part), start: met, end });
        }
        stretches.retain(|stretch| stretch.start < stretch.end);
        stretches
    };
    ranks.iter().map(of_rank).collect()
}

/// A picture of the step of median length.
pub(super) fn draw(title: &str, ranks: &[RankSteps]) -> Scene {
    let of_step = |step: usize| -> Vec<[Duration; PARTS.len()]> { ranks.iter().map(|rank| rank.times[step]).collect() };
    let length =
        |step: usize| of_step(step).iter().map(|times| times.iter().sum::<Duration>()).max().unwrap_or_default();
    let steps = ranks.first().map_or(0, |rank| rank.times.len());
    // The first step is not timed.
    let mut by_length: Vec<usize> = (1..steps).collect();
    by_length.sort_by_key(|step| length(*step));
    let step = by_length.get(by_length.len() / 2).copied().unwrap_or(0);
    picture(title, &stretches(&of_step(step)), length(step))
}

fn picture(title: &str, ranks: &[Vec<Stretch>], length: Duration) -> Scene {
    let [left, right] = SIDES;
    let x = |time: Duration| left + (time.as_secs_f64() / length.as_secs_f64().max(1e-9) * f64::from(WIDTH)) as u32;
    let rows = u32::try_from(ranks.len()).unwrap_or(u32::MAX);
    let bottom = TITLE + rows * ROW;
    let mut scene =
        Scene { width: left + WIDTH + right, height: bottom + LEGEND, boxes: Vec::new(), texts: Vec::new() };
    let mut text = |x, y, anchor, size, text: String| scene.texts.push(Text { x, y, anchor, size, text });
    text(left, TITLE / 2, Anchor::Start, Size::Large, title.to_owned());
    for (rank, stretches) in (0..).zip(ranks) {
        let y = TITLE + rank * ROW;
        text(left - 8, y + ROW / 2, Anchor::End, Size::Small, format!("rank {rank}"));
        for Stretch { part, start, end } in stretches {
            let colour = part.map_or(WAITING, |part| COLOURS[part]);
            let width = x(*end) - x(*start);
            scene.boxes.push(Box { x: x(*start), y: y + 3, width, height: ROW - 6, colour });
        }
    }
    scene.boxes.push(Box { x: left, y: bottom, width: WIDTH, height: 1, colour: LINE });
    for quarter in 0..=4 {
        let time = length * quarter / 4;
        scene.boxes.push(Box { x: x(time), y: bottom, width: 1, height: 5, colour: LINE });
        text(x(time), bottom + 14, Anchor::Middle, Size::Small, format!("{:.2} ms", time.as_secs_f64() * 1e3));
    }
    let names = PARTS.into_iter().zip(COLOURS).chain([("waiting", WAITING)]);
    for (place, (name, colour)) in (0..).zip(names) {
        let (x, y) = (left + place * 130, bottom + 42);
        scene.boxes.push(Box { x, y: y - 7, width: 14, height: 14, colour });
        text(x + 20, y, Anchor::Start, Size::Small, name.to_owned());
    }
    scene
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: Duration = Duration::from_millis(1);

    /// Rank 0 attends for 5 ms, rank 1 for 2 ms; both exchange for 1 ms behind the later one.
    fn two_ranks() -> Vec<[Duration; PARTS.len()]> {
        vec![[MS, MS, 5 * MS, MS, MS], [MS, MS, 2 * MS, 4 * MS, MS]]
    }

    #[test]
    fn a_rank_that_comes_early_waits_until_the_last_one_has_come() {
        let ranks = stretches(&two_ranks());
        let waits = |rank: usize| -> Vec<Stretch> {
            ranks[rank].iter().copied().filter(|stretch| stretch.part.is_none()).collect()
        };
        assert_eq!(waits(0), []);
        assert_eq!(waits(1), [Stretch { part: None, start: 4 * MS, end: 7 * MS }]);
        for rank in &ranks {
            assert_eq!(rank.last().unwrap().end, 9 * MS);
            assert!(rank.windows(2).all(|pair| pair[0].end == pair[1].start), "{rank:?}");
        }
    }

    #[test]
    fn a_picture_has_a_row_for_each_rank_within_its_frame() {
        let scene = picture("two", &stretches(&two_ranks()), 9 * MS);
        assert!(scene.boxes.iter().all(|one| one.x + one.width <= scene.width && one.y + one.height <= scene.height));
        let of_colour = |colour| scene.boxes.iter().filter(move |one| one.colour == colour && one.height == ROW - 6);
        assert_eq!(of_colour(COLOURS[2]).count(), 2);
        let waiting: Vec<&Box> = of_colour(WAITING).collect();
        // A third of the time, beside what the other rank attends to.
        assert_eq!((waiting.len(), waiting[0].width), (1, WIDTH / 3));
        // A step that took no time is drawn as well.
        let _ = picture("none", &stretches(&[[Duration::ZERO; PARTS.len()]; 2]), Duration::ZERO);
    }
}
