-- Fits an executed notebook, as pandoc reads it, to the parts that page.html and page.typ know.
-- Strangers' text stays text: no raw HTML or Typst of theirs gets through, no link or picture leads
-- anywhere but to the web on a click.

local MARKDOWN = 'commonmark-raw_html+pipe_tables+tex_math_dollars+strikeout+autolink_bare_uris'
local DOTS_PER_INCH, TEXT_WIDTH = 120, 6.85 -- of figures; inches between page.typ's margins
local LETTERS_TOGETHER = 900 -- of a table that is small enough to stay on one page
local LETTERS_ABREAST = 115 -- of a table's columns, that fit between the margins
local for_typst = FORMAT == 'typst'
local pages, figures = '', 0

local function part(kind, blocks)
  return pandoc.Div(blocks, {class = 'part ' .. kind})
end

local function output(div)
  local blocks, first = div.content, div.content[1]
  if first and first.t == 'RawBlock' and first.format == 'markdown' then
    local asked = first.text:match '^No prediction of %*(.-)%* yet'
    if asked then -- a line to write on
      return part('prediction', {pandoc.Para{'My prediction of ', pandoc.Emph(asked), ':'}})
    end
    blocks = pandoc.read(first.text .. '\n', MARKDOWN).blocks
  elseif first and first.t == 'Para' and first.content[1].t == 'Image' then
    return part('figure', blocks)
  end
  return part('output', blocks)
end

-- On paper nothing runs: what a cell imports is of no use there, nor the call that ends a lab.
local function for_paper(code)
  if code:find 'lab%.done%(' then return '' end
  code = ('\n' .. code):gsub('\nplots%.use_style%(%)', '')
  code = code:gsub('\nfrom [%w._]+ import %b()', ''):gsub('\nfrom [%w._]+ import [^\n]*', '')
  return (code:gsub('\nimport [^\n]*', ''):gsub('^\n+', ''):gsub('\n\n\n+', '\n\n'))
end

local function cell(div)
  local tags, blocks = div.attributes.tags or '', pandoc.Blocks{}
  if tags:find '"parameters"' then return blocks end -- the facts at the top have them
  for _, block in ipairs(div.content) do
    if block.t == 'Div' and block.classes:includes 'output' then
      blocks:insert(output(block))
    elseif block.t == 'CodeBlock' and div.classes:includes 'code' then
      if for_typst then block.text = for_paper(block.text) end
      local kind = tags:find '"exercise"' and 'exercise-input' or 'input'
      if block.text ~= '' then blocks:insert(part(kind, {block})) end
    else
      blocks:insert(block)
    end
  end
  for _, kind in ipairs{'solution', 'facts', 'prediction', 'lines'} do
    if tags:find('"' .. kind .. '"') then return pandoc.Blocks{part(kind, blocks)} end
  end
  return blocks
end

-- Addresses stay links; another lab's notebook is its page, except as another machine ran it.
local function link(it)
  local name = it.target:gsub('#.*', ''):match '[^/]*$'
  if name ~= '' and pages:find(' ' .. name .. ' ', 1, true) and not it.target:find 'reference' then
    return pandoc.Link(it.content, (name:gsub('ipynb$', 'html')))
  end
  return it.target:match '^https?://' and pandoc.Link(it.content, it.target) or it.content
end

local function image(it)
  local mime, data = pandoc.mediabag.lookup(it.src)
  if not mime or not it.src:match '^[%w._-]+$' then return it.caption end
  figures = figures + 1
  local alt = 'Figure ' .. figures
  if not for_typst then
    return pandoc.Image(alt, pandoc.mediabag.make_data_uri(mime, data))
  end
  local dots = mime == 'image/png' and string.unpack('>I4', data, 17) or 1e4
  local width = math.min(100, 100 * dots / DOTS_PER_INCH / TEXT_WIDTH)
  local code = '#image("%s", alt: "%s", width: %.1f%%)'
  return pandoc.RawInline('typst', code:format(it.src, alt, width))
end

local function is_number(text)
  text = text:gsub('−', '-'):gsub('–', '-'):gsub('≈', '~'):gsub('±', '~'):gsub('µ', 'u')
  return text:match '^%p*%s?%d[%d.,e+-]*%s?%a?%a?%a?%%?$' or text:match '^%p*$' or text == 'nan'
end

local function text_of(row, place)
  return row and row.cells[place] and pandoc.utils.stringify(row.cells[place].contents) or ''
end

-- Columns of numbers are set to the right. Columns find their own width; where a line of each would be
-- too wide for a page, texts share in proportion what names and numbers leave.
local function table_(it)
  local letters, each, line, fixed, loose = 0, {}, 0, 0, 0
  for place, column in ipairs(it.colspecs) do
    local numbers, some, longest = place > 1, false, 0
    local word = math.min(#text_of(it.head.rows[1], place), 10)
    for _, body in ipairs(it.bodies) do
      for _, row in ipairs(body.body) do
        local text = text_of(row, place)
        letters, longest = letters + #text, math.max(longest, #text)
        for piece in text:gmatch '[^%s/_.=:-]+' do word = math.max(word, #piece) end
        numbers, some = numbers and is_number(text), some or text:find '%d' ~= nil
      end
    end
    it.colspecs[place] = {numbers and some and pandoc.AlignRight or pandoc.AlignLeft, nil}
    each[place] = {word + 3, math.max(1, math.min(longest, LETTERS_ABREAST) - word)}
    line, fixed, loose = line + longest, fixed + each[place][1], loose + each[place][2]
  end
  local left = math.max(0, LETTERS_ABREAST - fixed) / loose
  for place, one in ipairs(line > LETTERS_ABREAST and each or {}) do
    it.colspecs[place][2] = (one[1] + left * one[2]) / math.max(LETTERS_ABREAST, fixed)
  end
  return letters < LETTERS_TOGETHER and part('together', {it}) or it
end

local function as_text(it)
  return it.t == 'RawInline' and pandoc.Str(it.text) or pandoc.Para{pandoc.Str(it.text)}
end

-- A stranger's language may end what Typst quotes.
local function code(it)
  return pandoc.CodeBlock(it.text, {class = it.classes[1] and it.classes[1]:match '^[%w_+-]+$'})
end

local function bare_header(it)
  return pandoc.Header(it.level, it.content) -- labs have sections of the same name
end

local function typst_part(it)
  if not it.classes:includes 'part' then return it.content end
  local blocks = pandoc.Blocks{pandoc.RawBlock('typst', '#' .. it.classes[2] .. '-part[')}
  blocks:extend(it.content)
  blocks:insert(pandoc.RawBlock('typst', ']'))
  return blocks
end

function Pandoc(doc)
  pages = ' ' .. pandoc.utils.stringify(doc.meta.pages or '') .. ' '
  local blocks = pandoc.Blocks{}
  for _, block in ipairs(doc.blocks) do
    blocks:extend(block.t == 'Div' and cell(block) or {block})
  end
  blocks = blocks:walk{RawInline = as_text, RawBlock = as_text}
  blocks = blocks:walk{Link = link, Image = image, Table = table_, CodeBlock = code}
  if for_typst then blocks = blocks:walk{Header = bare_header}:walk{Div = typst_part} end
  return pandoc.Pandoc(blocks)
end
