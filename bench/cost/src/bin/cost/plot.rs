//! Plots: panels side by side, both axes logarithmic.

use std::path::Path;

use hapax_bench_cost::Any;
use plotters::prelude::*;

const WIDTH: u32 = 560;
const HEIGHT: u32 = 380;

pub(crate) struct Panel {
    pub(crate) title: String,
    pub(crate) x: String,
    pub(crate) lines: Vec<Line>,
}

pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<(f64, f64)>,
}

/// Draws the panels into a file, as SVG.
pub(crate) fn draw(panels: &[Panel], path: &Path) -> Result<(), Any> {
    let width = WIDTH * u32::try_from(panels.len())?;
    let root = SVGBackend::new(path, (width, HEIGHT)).into_drawing_area();
    root.fill(&WHITE)?;
    for (panel, area) in panels.iter().zip(root.split_evenly((1, panels.len()))) {
        let points = || panel.lines.iter().flat_map(|line| &line.points);
        let range = |of: fn(&(f64, f64)) -> f64| {
            let least = points().map(of).fold(f64::INFINITY, f64::min);
            let greatest = points().map(of).fold(f64::MIN_POSITIVE, f64::max);
            (least * 0.9..greatest * 1.15).log_scale()
        };
        let mut chart = ChartBuilder::on(&area)
            .caption(&panel.title, ("sans-serif", 16))
            .margin(12)
            .x_label_area_size(36)
            .y_label_area_size(64)
            .build_cartesian_2d(range(|point| point.0), range(|point| point.1))?;
        chart.configure_mesh().x_desc(panel.x.as_str()).light_line_style(TRANSPARENT).draw()?;
        for (index, line) in panel.lines.iter().enumerate() {
            let color = Palette99::pick(index).to_rgba();
            chart
                .draw_series(
                    LineSeries::new(line.points.clone(), color.stroke_width(2)).point_size(3),
                )?
                .label(line.name.as_str())
                .legend(move |(x, y)| PathElement::new([(x, y), (x + 16, y)], color));
        }
        chart
            .configure_series_labels()
            .position(SeriesLabelPosition::UpperLeft)
            .background_style(WHITE.mix(0.8))
            .draw()?;
    }
    root.present()?;
    Ok(())
}
