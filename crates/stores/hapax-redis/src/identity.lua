-- The identity of a store: a random text of 32 characters, and after it '+' once an operator has
-- confirmed it. It goes with everything else when the server is emptied.
--
-- KEYS[1]  where it is
-- ARGV[1]  the identity to leave where there is none, or nothing
-- ARGV[2]  1 to confirm the one that is there, or the one that is left
--
-- The answer is what is there then, or an empty text.
local found = redis.pcall('GET', KEYS[1])
if type(found) == 'table' then
  return redis.error_reply('HAPAX ' .. found.err)
end
local wanted = found or ARGV[1]
if ARGV[2] == '1' and wanted ~= '' then
  wanted = string.sub(wanted, 1, 32) .. '+'
end
if wanted == '' or wanted == found then
  return wanted
end
local done = redis.pcall('SET', KEYS[1], wanted)
if done.err then
  return redis.error_reply('NOTWRITTEN ' .. done.err)
end
return wanted
