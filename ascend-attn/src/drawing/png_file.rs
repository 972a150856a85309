//! A scene as PNG.

use std::convert::Infallible;

use embedded_graphics::Pixel;
use embedded_graphics::geometry::{OriginDimensions, Point, Size as Dots};
use embedded_graphics::mono_font::iso_8859_1::{FONT_7X13, FONT_9X15};
use embedded_graphics::mono_font::{MonoFont, MonoTextStyle};
use embedded_graphics::pixelcolor::{Rgb888, RgbColor};
use embedded_graphics::prelude::{DrawTarget, Drawable, Primitive};
use embedded_graphics::primitives::{PrimitiveStyle, Rectangle};
use embedded_graphics::text::{Alignment, Baseline, Text, TextStyleBuilder};

use super::{Anchor, Scene, Size};

/// The bytes of the file.
pub(super) fn bytes(scene: &Scene) -> Result<Vec<u8>, png::EncodingError> {
    let mut canvas = Canvas::new(scene.width, scene.height);
    for filled_box in &scene.boxes {
        let place = Rectangle::new(point(filled_box.x, filled_box.y), Dots::new(filled_box.width, filled_box.height));
        let [r, g, b] = filled_box.colour;
        let filled = place.into_styled(PrimitiveStyle::with_fill(Rgb888::new(r, g, b)));
        let Ok(()) = filled.draw(&mut canvas);
    }
    for label in &scene.texts {
        let font: &MonoFont<'_> = match label.size {
            Size::Small => &FONT_7X13,
            Size::Large => &FONT_9X15,
        };
        let alignment = match label.anchor {
            Anchor::Start => Alignment::Left,
            Anchor::Middle => Alignment::Center,
            Anchor::End => Alignment::Right,
        };
        let style = TextStyleBuilder::new().alignment(alignment).baseline(Baseline::Middle).build();
        let ink = MonoTextStyle::new(font, Rgb888::new(0x22, 0x22, 0x22));
        let text = Text::with_text_style(&label.text, point(label.x, label.y), ink, style);
        let Ok(_) = text.draw(&mut canvas);
    }
    let mut file = Vec::new();
    let mut encoder = png::Encoder::new(&mut file, scene.width, scene.height);
    encoder.set_color(png::ColorType::Rgb);
    encoder.set_depth(png::BitDepth::Eight);
    let mut writer = encoder.write_header()?;
    writer.write_image_data(&canvas.bytes)?;
    writer.finish()?;
    Ok(file)
}

/// The picture's pixels; white at first.
struct Canvas {
    width: u32,
    height: u32,
    bytes: Vec<u8>,
}

impl Canvas {
    fn new(width: u32, height: u32) -> Self {
        Self { width, height, bytes: vec![0xff; 3 * width as usize * height as usize] }
    }
}

impl OriginDimensions for Canvas {
    fn size(&self) -> Dots {
        Dots::new(self.width, self.height)
    }
}

impl DrawTarget for Canvas {
    type Color = Rgb888;
    type Error = Infallible;

    fn draw_iter<I>(&mut self, dots: I) -> Result<(), Infallible>
    where
        I: IntoIterator<Item = Pixel<Rgb888>>,
    {
        for Pixel(at, colour) in dots {
            let (Ok(x), Ok(y)) = (u32::try_from(at.x), u32::try_from(at.y)) else {
                continue;
            };
            if x >= self.width || y >= self.height {
                continue;
            }
            let first = 3 * (y as usize * self.width as usize + x as usize);
            if let Some(dot) = self.bytes.get_mut(first..first + 3) {
                dot.copy_from_slice(&[colour.r(), colour.g(), colour.b()]);
            }
        }
        Ok(())
    }
}

fn point(x: u32, y: u32) -> Point {
    let clamp = |coordinate| i32::try_from(coordinate).unwrap_or(i32::MAX);
    Point::new(clamp(x), clamp(y))
}
