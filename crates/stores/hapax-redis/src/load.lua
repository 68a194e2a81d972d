-- What a cell holds, and when that was so. See swap.lua for what a cell looks like, and for the
-- code of the error.
--
-- KEYS[1]  the cell; the answer begins with it, so that one that went astray is found out
local time = redis.call('TIME')
local now = time[1] * 1000000 + time[2]
local cell = redis.pcall('GET', KEYS[1])
if type(cell) == 'table' then
  local code = string.find(cell.err, 'WRONGTYPE', 1, true) and 'HAPAX ' or 'NOTREAD '
  return redis.error_reply(code .. cell.err)
end
local due = cell and tonumber(string.sub(cell, 69, 84))
if due and due <= now then
  cell = false
end
return {KEYS[1], string.format('%.0f', now), cell}
