//! A formula as a scene: cells, tiles, numbers, legend.

use ascend_attention::spec::{Tile, Visibility};

use super::formula::{Formula, Label};
use crate::drawing::{Anchor, Box, Colour, Scene, Size, Text};

/// Most dots that the cells take up in each direction.
const ROOM: u64 = 960;
/// Largest side of a cell that is drawn by itself.
const LARGEST: u64 = 26;
/// From this side on, cells have a line between them.
const LINED: u32 = 8;

const WHITE: Colour = [0xff, 0xff, 0xff];
const BLOCK_LINE: Colour = [0x33, 0x33, 0x33];

const fn colour(label: Label) -> Colour {
    match label {
        Label::Hidden => [0xe4, 0xe7, 0xeb],
        Label::Elsewhere => [0xf6, 0xf7, 0xf8],
        Label::Seen => [0x44, 0x77, 0xaa],
        Label::Window => [0x66, 0xcc, 0xee],
        Label::Sink => [0xee, 0x66, 0x77],
        Label::Last => [0x22, 0x88, 0x33],
        Label::Prefix => [0xaa, 0x33, 0x77],
        Label::LeftOut => [0xf5, 0xe6, 0xb3],
    }
}

/// The colour of a tile with visible and hidden cells, where cells are too small to be drawn.
const MIXED: Colour = [0x9f, 0xb8, 0xd3];

/// The position of the cells in the picture.
struct Grid {
    left: u32,
    top: u32,
    /// Number of dots in the side of a drawn square.
    side: u32,
    /// Number of rows and of keys in a drawn square.
    step: u64,
}

impl Grid {
    fn x(&self, key: u64) -> u32 {
        self.left + self.dots(key)
    }

    fn y(&self, row: u64) -> u32 {
        self.top + self.dots(row)
    }

    fn dots(&self, cells: u64) -> u32 {
        u32::try_from(cells.div_ceil(self.step)).unwrap_or(0) * self.side
    }
}

/// Most letters of a title, which may come from a file or list any number of sequences.
const TITLE: usize = 160;

/// Draws a formula. Tiles of `block` rows and keys are counted, and outlined where there are several.
pub(super) fn draw(title: &str, formula: &Formula, block: Option<u64>) -> Scene {
    let mut title: String = title.to_owned();
    if let Some((cut, _)) = title.char_indices().nth(TITLE) {
        title.truncate(cut);
        title.push_str("...");
    }
    let (rows, keys) = (formula.q_len(), formula.kv_len());
    let most = rows.max(keys).max(1);
    let step = most.div_ceil(ROOM);
    let side = u32::try_from((ROOM / most.div_ceil(step)).min(LARGEST)).unwrap_or(1);
    let block = block.unwrap_or(match most {
        ..=16 => 4,
        17..=64 => 8,
        65..=256 => 16,
        _ => 128,
    });
    // Tiles too small to be seen are merged for the picture.
    let block = block.max(most.div_ceil(256));

    let (letter, line) = Size::Small.letter();
    let digits = |count: u64| count.saturating_sub(1).to_string().len() as u32;
    let left = 24 + letter * digits(rows);
    let grid = Grid { left: left.max(44), top: 96, side, step };
    let (right, bottom) = (grid.x(keys), grid.y(rows));

    let mut scene = Scene { width: 0, height: 0, boxes: Vec::new(), texts: Vec::new() };
    let mut labels = cells(formula, &grid, &mut scene);
    let counts = blocks(formula, &grid, block, &mut scene);

    let mut text = |x, y, anchor, size, text: String| {
        scene.texts.push(Text { x, y, anchor, size, text });
    };
    text(12, 18, Anchor::Start, Size::Large, title.to_owned());
    let cells = u128::from(rows) * u128::from(keys);
    let visible = formula.visible();
    let share = if cells == 0 { 0.0 } else { 100.0 * visible as f64 / cells as f64 };
    let summary = format!("{visible} of {cells} visible ({share:.1}%)");
    text(12, 38, Anchor::Start, Size::Small, summary.clone());
    let [none, mixed, all] = counts;
    let tiles = format!("tiles of {block} x {block}: {all} all visible, {mixed} mixed, {none} hidden");
    text(12, 54, Anchor::Start, Size::Small, tiles.clone());
    let axes = "row i down, key j across".to_owned();
    text(12, 70, Anchor::Start, Size::Small, axes);
    let step_of = |letters: u32, count: u64| every(letters, side, step, count);
    let across = step_of(letter * (digits(keys) + 1), keys);
    for key in (0..keys).step_by(across) {
        text(grid.x(key) + side / 2, 88, Anchor::Middle, Size::Small, key.to_string());
    }
    let down = step_of(line, rows);
    for row in (0..rows).step_by(down) {
        let x = grid.left - 5;
        text(x, grid.y(row) + side / 2, Anchor::End, Size::Small, row.to_string());
    }

    // The legend: as many entries a line as fit.
    labels.sort_by_key(|label| *label as u8);
    let least = letter * title.len().max(tiles.len()).max(summary.len()) as u32;
    let title_width = Size::Large.letter().0 * title.len() as u32;
    let width = (right + 24).max(title_width.max(least) + 24);
    let (mut x, mut y) = (grid.left, bottom + 24);
    let mut entries: Vec<(Colour, &str)> =
        labels.iter().map(|&label| (colour(label), formula.meaning(label))).collect();
    if step > 1 {
        entries.push((MIXED, "some visible"));
    }
    for (colour, meaning) in entries {
        let needed = 22 + letter * (meaning.len() as u32 + 2);
        if x + needed > width && x > grid.left {
            (x, y) = (grid.left, y + 20);
        }
        scene.boxes.push(Box { x, y: y - 7, width: 14, height: 14, colour });
        scene.texts.push(Text { x: x + 20, y, anchor: Anchor::Start, size: Size::Small, text: meaning.to_owned() });
        x += needed;
    }
    (scene.width, scene.height) = (width, y + 20);
    scene
}

/// Draws the cells, and returns the labels that occur.
fn cells(formula: &Formula, grid: &Grid, scene: &mut Scene) -> Vec<Label> {
    let (rows, keys) = (formula.q_len(), formula.kv_len());
    let mut labels = Vec::new();
    let mut note = |label| {
        if !labels.contains(&label) {
            labels.push(label);
        }
    };
    let gap = u32::from(grid.side >= LINED);
    for row in (0..rows).step_by(size(grid.step)) {
        // Neighbours of one colour are one box, and lines are put over them.
        let mut last: Option<Box> = None;
        let tiles = match grid.step {
            1 => Vec::new(),
            step => formula.tiles(row..row + step, step),
        };
        // The cells of a full or empty tile mostly have one label: that of the first cell of its last row.
        let end = (row + grid.step).min(rows) - 1;
        for (at, key) in (0..keys).step_by(size(grid.step)).enumerate() {
            let colour = match tiles.get(at) {
                Some(Tile::Mixed) => MIXED,
                _ => {
                    let label = formula.label(end, key);
                    note(label);
                    colour(label)
                }
            };
            let cell = Box { x: grid.x(key), y: grid.y(row), width: grid.side, height: grid.side - gap, colour };
            match &mut last {
                Some(before) if before.colour == colour => before.width += grid.side,
                _ => scene.boxes.extend(last.replace(cell)),
            }
        }
        scene.boxes.extend(last);
    }
    if gap > 0 {
        for key in 0..keys {
            scene.boxes.push(Box {
                x: grid.x(key + 1) - 1,
                y: grid.top,
                width: 1,
                height: grid.y(rows) - grid.top,
                colour: WHITE,
            });
        }
    }
    labels
}

/// Counts tiles without, with some and with all cells visible, and draws the lines between tiles.
fn blocks(formula: &Formula, grid: &Grid, block: u64, scene: &mut Scene) -> [u64; 3] {
    let (rows, keys) = (formula.q_len(), formula.kv_len());
    let mut counts = [0; 3];
    for row in (0..rows).step_by(size(block)) {
        for tile in formula.tiles(row..row.saturating_add(block), block) {
            counts[match tile {
                Tile::None => 0,
                Tile::Mixed => 1,
                Tile::All => 2,
            }] += 1;
        }
    }
    let (right, bottom) = (grid.x(keys), grid.y(rows));
    for row in (block..rows).step_by(size(block)) {
        scene.boxes.push(Box {
            x: grid.left,
            y: grid.y(row) - 1,
            width: right - grid.left,
            height: 1,
            colour: BLOCK_LINE,
        });
    }
    for key in (block..keys).step_by(size(block)) {
        scene.boxes.push(Box {
            x: grid.x(key) - 1,
            y: grid.top,
            width: 1,
            height: bottom - grid.top,
            colour: BLOCK_LINE,
        });
    }
    counts
}

/// The number of rows or keys from one printed number to the next, so that numbers of `dots` dots do not touch.
fn every(dots: u32, side: u32, step: u64, count: u64) -> usize {
    let cells = u64::from(dots.div_ceil(side.max(1))) * step;
    let round = [1, 2, 4, 8, 16, 32, 64, 128, 256, 512];
    let known = round.into_iter().find(|&round| round >= cells);
    size(known.unwrap_or_else(|| cells.next_multiple_of(1024)).min(count.max(1)))
}

fn size(count: u64) -> usize {
    usize::try_from(count).unwrap_or(usize::MAX).max(1)
}
